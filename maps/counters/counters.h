/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* counter: the value of drops and of traffic, one a CPU for each direction and slot. */
#ifndef EC_MAPS_COUNTERS_H
#define EC_MAPS_COUNTERS_H

#include "maps/wire/wire.h"

/* bytes are of whole frames, as long as they arrived. */
struct counter {
	__u64 packets;
	__u64 bytes;
};

#endif
