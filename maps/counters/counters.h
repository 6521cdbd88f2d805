/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* counter: the value of the maps drops and traffic, one per CPU for each direction and slot. The programs add to it. */
#ifndef EC_MAPS_COUNTERS_H
#define EC_MAPS_COUNTERS_H

#include "maps/wire/wire.h"

struct counter {
	__u64 packets;
	__u64 bytes; /* of whole frames, at their length on arrival */
};

#endif
