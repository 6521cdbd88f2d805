/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * What a step of a packet's walk decides. Steps are chained by ?: in their order: the
 * first that decides ends the walk, so that no later one can undo a decision.
 */
#ifndef EC_LIB_VERDICT_H
#define EC_LIB_VERDICT_H

#include "maps/drops/drops.h"

enum verdict {
	VERDICT_LEAST = -DROP_REASONS, /* below GO_ON: a drop, by its negated reason */
	VERDICT_GO_ON = 0,             /* undecided: the next step follows */
	VERDICT_DELIVERED,             /* redirected into a pod of this node */
	VERDICT_FORWARDED,             /* redirected out of an uplink, or into the tunnel */
	VERDICT_STACK,                 /* passed on to other programs and the host's stack */
	VERDICT_ANSWERED,              /* turned into its own answer */
};

#endif
