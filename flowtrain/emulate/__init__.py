"""Devices that are not here, under the runtime that is: every part of a run is real but the compute of the two modules.

    controller, packing, flow, pool, exchange, checkpoints ── orders ──▶ emulated stage ── waits as long as the device
            the code of a run, as it is            ◀── answers ──          would compute, moves real bytes

| module | has |
|---|---|
| `case`, `emulation` | what is asked for; what is emulated, as one JSON file in the run's folder |
| `seconds`, `meeting` | how long a piece of work lasts; work that several devices do together |
| `stages`, `slot`, `executor` | reader, producer and consumer without torch; their place; the processes they share |
| `run`, `modelled` | a run and its figures; what its schedule alone takes |
| `meter` | messages, bytes and time of the controller |
| `driver` | the process of a run of its own |
"""
