/* A stand-in for NVIDIA's library: what it answers is in the file that FAKE_NVML names, read anew at every call.
   Lines are "KEY NUMBER": init, count, lost (index of a device that has fallen off the bus), mig, throttle, links (KiB
   so far), growth (of links, KiB/s), up (NVLinks), near (mask of NUMA nodes), utilization, memory (MiB), power (mW), temperature, pcie (kB/s), fail.FIGURE (the error of one figure). Two devices, all well, where a line is missing. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef struct { unsigned long long total, free, used; } memory_t;
typedef struct { unsigned gpu, memory; } rates_t;
typedef struct {
    unsigned field, scope;
    long long timestamp, latency;
    unsigned type, result;
    unsigned long long value;
} field_t;

static long devices[] = {0, 1, 2, 3};

static long told(const char *key, long otherwise) {
    const char *path = getenv("FAKE_NVML");
    FILE *file = path ? fopen(path, "r") : NULL;
    char name[64];
    long value;
    while (file && fscanf(file, "%63s %ld", name, &value) == 2)
        if (!strcmp(name, key)) otherwise = value;
    if (file) fclose(file);
    return otherwise;
}

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec + 1e-9 * now.tv_nsec;
}

static int ask(void *device, const char *figure) {
    char key[64];
    if (device && *(long *)device == told("lost", -1)) return 15;
    snprintf(key, sizeof key, "fail.%s", figure);
    return (int)told(key, 0);
}

int nvmlInitWithFlags(unsigned flags) { return (int)told("init", 0); }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int code) { return code == 999 ? "Unknown Error" : "an error"; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = (unsigned)told("count", 2); return ask(NULL, "count"); }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
    *device = &devices[index];
    return ask(*device, "handle");
}
int nvmlDeviceGetUUID(void *device, char *text, unsigned bytes) {
    snprintf(text, bytes, "GPU-%ld", *(long *)device);
    return ask(device, "uuid");
}
int nvmlDeviceGetHandleByUUID(const char *text, void **device) {
    *device = &devices[atol(text + 4)];
    return ask(*device, "handle");
}
int nvmlDeviceGetName(void *device, char *text, unsigned bytes) {
    snprintf(text, bytes, "Stand-in %ld", *(long *)device);
    return ask(device, "name");
}
int nvmlDeviceGetNvLinkState(void *device, unsigned link, unsigned *up) {
    *up = link < (unsigned)told("up", 2);
    return ask(device, "link");
}
int nvmlDeviceGetMemoryAffinity(void *device, unsigned words, unsigned long *mask, unsigned scope) {
    mask[0] = (unsigned long)told("near", 2) << *(long *)device;
    return ask(device, "affinity");
}
int nvmlDeviceGetMigMode(void *device, unsigned *now, unsigned *next) {
    *now = *next = (unsigned)told("mig", 0);
    return ask(device, "mig");
}
int nvmlDeviceGetUtilizationRates(void *device, rates_t *rates) {
    rates->gpu = (unsigned)told("utilization", 40) + 10 * (unsigned)*(long *)device;
    if (told("mig", 0)) return 3;
    return ask(device, "utilization");
}
int nvmlDeviceGetMemoryInfo(void *device, memory_t *memory) {
    memory->total = 80ull << 30; memory->used = (unsigned long long)told("memory", 1536) << 20; memory->free = memory->total - memory->used;
    return ask(device, "memory");
}
int nvmlDeviceGetPowerUsage(void *device, unsigned *milliwatts) { *milliwatts = (unsigned)told("power", 312500); return ask(device, "power"); }
int nvmlDeviceGetTemperature(void *device, unsigned sensor, unsigned *celsius) {
    *celsius = sensor ? 0 : (unsigned)told("temperature", 61);
    return ask(device, "temperature");
}
int nvmlDeviceGetPcieThroughput(void *device, unsigned way, unsigned *kilobytes) {
    *kilobytes = (unsigned)told("pcie", 1000) + (way ? 500 : -500);
    return ask(device, "pcie");
}
int nvmlDeviceGetFieldValues(void *device, int count, field_t *values) {
    for (int i = 0; i < count; i++) {
        values[i].result = (unsigned)told("fail.link", 0);
        values[i].type = 3;
        values[i].value = (unsigned long long)(told("links", 1024) + told("growth", 0) * seconds());
    }
    return ask(device, "nvlink");
}
int nvmlDeviceGetCurrentClocksThrottleReasons(void *device, unsigned long long *bits) {
    *bits = (unsigned long long)told("throttle", 1);
    return ask(device, "throttle");
}
