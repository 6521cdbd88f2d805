/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * What a step of a packet's walk decides. Steps are chained by ?: in the order in
 * which they are taken: the first that decides ends the walk, and none after it can
 * undo that.
 */
#ifndef EC_LIB_VERDICT_H
#define EC_LIB_VERDICT_H

#include "maps/drops/drops.h"

enum verdict {
	VERDICT_LEAST = -DROP_REASONS, /* what is below GO_ON is a drop, its reason negated */
	VERDICT_GO_ON = 0,             /* nothing is decided: the next step */
	VERDICT_DELIVERED,             /* redirected into a pod of this node */
	VERDICT_FORWARDED,             /* redirected out of an uplink */
	VERDICT_STACK,                 /* other programs and the host's stack go on with it */
	VERDICT_ANSWERED,              /* turned into its own answer */
};

#endif
