// SPDX-License-Identifier: MIT
// setmaxnreg.cuh: host twin. Registers are not counted here; that whole warpgroups agree is.
#pragma once

namespace cupyflash::twin {

using namespace host;

template <int count>
void setmaxnreg(const char* what, Place place) {
  static_assert(count % 8 == 0 && count >= 24 && count <= 256, "a multiple of 8 in 24..256");
  const char nothing = 0;
  warpgroup_collective<char>(what, place, nothing, [](const char*, Members, char*) {});
}

}  // namespace cupyflash::twin

namespace cupyflash {

template <int count>
void setmaxnreg_dec(host::Place place = host::Place::here()) {
  twin::setmaxnreg<count>("setmaxnreg_dec", place);
}

template <int count>
void setmaxnreg_inc(host::Place place = host::Place::here()) {
  twin::setmaxnreg<count>("setmaxnreg_inc", place);
}

}  // namespace cupyflash
