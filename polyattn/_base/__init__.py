"""What all parts share: arguments, arrays, files, streams, threads and the like."""
