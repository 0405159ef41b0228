"""The ground that all parts share: arguments, arrays, files, streams, threads and the like."""
