// All functions of one instruction set: this file is compiled once for each.
#include "backward.h"
#include "forward.h"
#include "matrix.h"

namespace POLYATTN_UNIT {

#define POLYATTN_TEXT_(x) #x
#define POLYATTN_TEXT(x) POLYATTN_TEXT_(x)

extern const Unit unit;
const Unit unit = {
    POLYATTN_TEXT(POLYATTN_UNIT),
    {Forward<float>::work, Forward<double>::work},
    {Backward<float>::work, Backward<double>::work},
    {Product<float>::work, Product<double>::work},
};

}  // namespace POLYATTN_UNIT
