// Turns (ticket order) of tasks that add to the same numbers, the gradient of a bias that items or heads share: at each
// block of scores they add in their order, whichever threads have them. So the bits of a sum do not
// depend on threads, and threads need no sums of their own.
//
// A number belongs to one position and one key, and no two parts of a key head have rows of one position
// (`parts_of`, `first_row_of`). So only tasks of the same part add to it, each in one block, or in some if
// the position's heads are in several groups of rows. A task does its blocks in order, and a block only
// when the task before is past the last one with its positions; so the additions of that task have
// happened, and by the same rule those of all before it.
#pragma once
#include "panel.h"
#include "work.h"

namespace POLYATTN_UNIT {

class Turns {
public:
    static constexpr int64_t LAST = INT64_MAX - 1;

    // `done` has a number for each task, 0 at first: the block that it may take next.
    Turns(const PolyattnCall& call, int64_t parts, void* done)
        : done_((int64_t*)done), distance_(distance(call) * parts) {}

    // Whether rows share numbers of a bias, one for each distance of a key from its row.
    static bool is_by_distance(const PolyattnArray& bias) { return bias.row == -1 && bias.column == 1; }
    static size_t size(const PolyattnCall& call, int64_t tasks) {
        return distance(call) ? (size_t)(tasks + 7) / 8 * 64 : 0;
    }

    // Whether the task before has done a block. It was begun before, so waiting for it ends.
    bool is_open(int64_t task, int64_t block) const {
        if (!distance_ || task < distance_) return true;
        for (int spin = 0; spin < 100; ++spin, relax()) {
            if (__atomic_load_n(done_ + task - distance_, __ATOMIC_ACQUIRE) > block) return true;
        }
        return false;
    }
    void pass(int64_t task, int64_t block) const {
        if (distance_) __atomic_store_n(done_ + task, block + 1, __ATOMIC_RELEASE);
    }

private:
    int64_t* done_;
    int64_t distance_;  // of two tasks that add to the same numbers; 0 if none do

    // That of their pairs of an item and a key head.
    static int64_t distance(const PolyattnCall& call) {
        int64_t found = 0;
        for (const PolyattnArray& bias : call.bias_gradient) {
            if (!bias.data || is_by_distance(bias)) continue;  // rows share numbers, so items do not
            if (bias.head == 0 && call.key_heads > 1) return 1;
            if ((bias.item == 0 || bias.offsets) && call.items > 1) found = call.key_heads;
        }
        return found;
    }
};

}  // namespace POLYATTN_UNIT
