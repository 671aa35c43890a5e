"""What knows no MPI: errors, settings, nests, arrays of NumPy and CuPy, hashes."""
