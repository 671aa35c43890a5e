"""Everything without MPI: errors, settings, nests, NumPy and CuPy arrays, hashes."""
