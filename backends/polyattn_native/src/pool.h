// Threads that take the tasks of a call by turns. They never run Python.
#pragma once
#include "work.h"

// Take tasks for some 30 ms, with at most `threads`, the caller among them. 0 once all are done, 1
// if the call is to be made again, below 0 if it failed. `state` holds a call under way.
int run_tasks(const PolyattnCall& call, Work (*make)(const PolyattnCall&), void*& state);
double share_of_tasks(const void* state);
void cancel_tasks(void*& state);
