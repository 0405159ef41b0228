"""The array-API kernels, written once for any library that follows the array API standard."""
