"""polyattn inside other libraries: each module here imports the library that it is for."""
