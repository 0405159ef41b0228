"""Description and checks of a call, in the letters of the semantics."""
