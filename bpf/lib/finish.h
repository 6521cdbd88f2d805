/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * The exit of programs that see what pods send, or ask Services from outside: some drops are answered by a packet to
 * the sender.
 */
#ifndef EC_LIB_FINISH_H
#define EC_LIB_FINISH_H

#include "bpf/lib/count.h"
#include "bpf/lib/refuse.h"
#include "bpf/lib/reset.h"
#include "bpf/lib/too_big.h"

/*
 * Whether netfilter may have translated what leaves by the stack: its pod would not know what the error quotes. What
 * the programs have translated they give back themselves.
 */
EC_INLINE bool finish_returns(void)
{
	struct scratch *s = scratch_get();

	return nf_translates() && s && !service_has_translated(s);
}

/* finish, for what may be answered. Where a drop is, the owner in the scratch record is told. */
EC_INLINE int answer_or_finish(struct __sk_buff *ctx, enum direction direction, enum verdict verdict)
{
	if (refuse_answers(verdict)) {
		count_drop(ctx, direction, -verdict);
		return refuse_answer(ctx, -verdict);
	}
	if (refuse_masquerade(verdict) &&
	    (direction == DIRECTION_FROM_POD || (direction == DIRECTION_TO_UPLINK && !finish_returns()))) {
		count_drop(ctx, direction, -verdict);
		return refuse_unreachable(ctx);
	}
	switch ((int)verdict) {
	case -DROP_NO_MAPPING:
		count_drop(ctx, direction, DROP_NO_MAPPING);
		return reset_answer(ctx);
	case -DROP_TOO_BIG:
		count_drop(ctx, direction, DROP_TOO_BIG);
		return direction == DIRECTION_TO_UPLINK && finish_returns() ? too_big_return(ctx) : too_big_answer(ctx);
	default:
		return finish(ctx, direction, verdict);
	}
}

#endif
