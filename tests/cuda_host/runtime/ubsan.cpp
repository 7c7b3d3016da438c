// UndefinedBehaviorSanitizer's handlers: what it finds ends the launch as every other finding does. The kernel is
// compiled with -fsanitize=undefined -fno-sanitize-recover=undefined and linked without; each handler's first argument
// begins with the place in the source.
#include "state.h"

namespace {

struct Place { const char* file; u32 line, column; };

[[noreturn]] void found(const char* what, const Place* place, u64 a = 0, u64 b = 0) {
  pkv_host::fail("UBSan: %s (%lld, %lld) at %s:%u:%u", what, static_cast<i64>(a), static_cast<i64>(b), place->file,
                 place->line, place->column);
}

}  // namespace

#define PKV_HANDLER(name) \
  extern "C" void __ubsan_handle_##name##_abort(Place* place, u64 a, u64 b) { found(#name, place, a, b); }
PKV_HANDLER(add_overflow)
PKV_HANDLER(sub_overflow)
PKV_HANDLER(mul_overflow)
PKV_HANDLER(negate_overflow)
PKV_HANDLER(divrem_overflow)
PKV_HANDLER(shift_out_of_bounds)
PKV_HANDLER(out_of_bounds)
PKV_HANDLER(pointer_overflow)
PKV_HANDLER(type_mismatch_v1)
PKV_HANDLER(load_invalid_value)
PKV_HANDLER(nonnull_arg)
PKV_HANDLER(float_cast_overflow)
PKV_HANDLER(vla_bound_not_positive)
PKV_HANDLER(invalid_builtin)
#undef PKV_HANDLER
extern "C" void __ubsan_handle_builtin_unreachable(Place* place) { found("unreachable code", place); }
extern "C" void __ubsan_handle_missing_return(Place* place) { found("missing return", place); }
