// Kernels of all other data types; and what Paddle calls to have all of them registered.

#include "kernels.h"

void paddle_device::register_kernels() {
  polyemu::register_floats();
  polyemu::register_elements<double, int32_t, int64_t, bool, uint8_t>();
}
