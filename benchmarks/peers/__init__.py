"""Other trainers on the rows, model folder, step size, dtype and cores of a config: `python -m benchmarks.peers`.

They are installed by `benchmarks/peers/requirements.txt` only.
"""
