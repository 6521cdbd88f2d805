/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * What a TCP connection has got to, as far as a middlebox can tell: the highest
 * numbers that each side has sent and acknowledged, and whether a RST, FIN or SYN is
 * to be believed. It knows neither of the tables in which that is kept.
 */
#ifndef EC_LIB_TCP_H
#define EC_LIB_TCP_H

#include "bpf/lib/pkt.h"
#include "maps/flow/flow.h"

/* Whether the packet opens a TCP connection: SYN without ACK. */
EC_INLINE bool tcp_is_opening(const struct pkt *pkt)
{
	return (pkt->tcp_flags & (TCP_SYN | TCP_ACK | TCP_RST)) == TCP_SYN;
}

EC_INLINE bool tcp_is_segment(const struct pkt *pkt)
{
	return pkt->tuple.proto == IPPROTO_TCP && pkt->fragment != FRAGMENT_LATER;
}

/* Raises the highest sequence and acknowledgement numbers of the segment's direction; state is that direction's. */
EC_INLINE void tcp_note_edges(const struct pkt *pkt, __u8 state, __u32 *seq_end, __u32 *ack)
{
	if (!tcp_is_segment(pkt) || (pkt->tcp_flags & TCP_RST))
		return;
	if (!(state & (FLOW_SYN | FLOW_ACK)) || (__s32)(pkt->seq_end - *seq_end) > 0)
		*seq_end = pkt->seq_end;
	if ((pkt->tcp_flags & TCP_ACK) && (!(state & (FLOW_ACK | FLOW_RESET)) || (__s32)(pkt->ack - *ack) > 0))
		*ack = pkt->ack;
}

/* How far beyond what its receiver has acknowledged a RST is believed: what was sent beyond may be forged. */
#define TCP_RESET_WINDOW (1U << 20)

/*
 * Whether its receiver would accept a RST (RFC 5961, section 3.2, as far as a middlebox
 * can tell): it lies between what the receiver has acknowledged and what the sender has
 * sent or, in answer to a SYN, acknowledges exactly that.
 */
EC_INLINE bool tcp_reset_valid(const struct pkt *pkt, __u8 state, __u32 seq_end, __u32 peer_ack, __u32 peer_seq_end)
{
	if (!(state & (FLOW_SYN | FLOW_ACK)))
		return (pkt->tcp_flags & TCP_ACK) && pkt->ack == peer_seq_end;
	return pkt->seq - peer_ack <= TCP_RESET_WINDOW && (__s32)(pkt->seq - seq_end) <= 0;
}

/* One direction of a TCP connection, wherever its entry keeps the fields. */
struct tcp_side {
	__u8 *state;
	__u32 *seq_end;
	__u32 *ack;
};

/* How far from what its receiver has acknowledged, either way, a FIN is believed: more than can be in flight. */
#define TCP_FIN_WINDOW (1U << 24)

/*
 * Whether an opener from outside is believed: it has acknowledged all that the other side has sent, which nobody else
 * has received. Until then anybody may have sent a segment, with any source; the other side does not say so.
 */
EC_INLINE bool tcp_proves(const struct pkt *pkt, const struct tcp_side *peer)
{
	return (pkt->tcp_flags & TCP_ACK) && (*peer->state & (FLOW_SYN | FLOW_ACK)) && pkt->ack == *peer->seq_end;
}

/*
 * The flow_state bits that a packet must not set: a FIN far from what its receiver has acknowledged is not believed.
 * unproved: it is of an opener that was not believed yet.
 */
EC_INLINE __u8 tcp_doubted(const struct pkt *pkt, const struct tcp_side *peer, bool unproved)
{
	if (unproved && !tcp_proves(pkt, peer))
		return FLOW_ACK | FLOW_FIN;
	if (!(pkt->tcp_flags & TCP_FIN) || !(*peer->state & FLOW_ACK))
		return 0;
	return pkt->seq_end - *peer->ack + TCP_FIN_WINDOW < 2 * TCP_FIN_WINDOW ? 0 : FLOW_FIN;
}

/* FLOW_FIRST if the packet has a FIN before which its side has acknowledged no FIN: that side will wait (TIME_WAIT). */
EC_INLINE __u8 tcp_closes_first(const struct pkt *pkt, const struct tcp_side *own, const struct tcp_side *peer)
{
	if (!(pkt->tcp_flags & TCP_FIN) || (*own->state & FLOW_FIN))
		return 0;
	return (*peer->state & FLOW_FIN) && (pkt->tcp_flags & TCP_ACK) && pkt->ack == *peer->seq_end ? 0 : FLOW_FIRST;
}

/*
 * Whether a RST ends the connection for both sides for sure: its receiver accepts only exactly the next number (RFC
 * 5961). That is what it has acknowledged: what the sender seems to have sent beyond may be forged, or was lost. The
 * opener must have sent nothing beyond either. An earlier RST has raised what counts as acknowledged.
 */
EC_INLINE bool tcp_reset_exact(const struct pkt *pkt, const struct tcp_side *own, const struct tcp_side *peer,
			       bool by_opener)
{
	if (!(pkt->tcp_flags & TCP_RST) || (*own->state & FLOW_RESET))
		return false;
	if (!(*own->state & (FLOW_SYN | FLOW_ACK)))
		return !by_opener && (pkt->tcp_flags & TCP_ACK) && pkt->ack == *peer->seq_end;
	return pkt->seq == *peer->ack && (by_opener ? *peer->ack == *own->seq_end : !!(*peer->state & FLOW_ACK));
}

/*
 * A RST inside the window marks the connection as reset, in both directions, though its
 * receiver may ignore it, as it accepts only an exact one. So both ack are raised to all
 * that the other side has sent: a later segment that acknowledges more was sent after
 * the RST was ignored, and removes the mark. Neither a segment that was already in
 * flight nor those of one side alone can do that. As forged data may have been among
 * what was sent, its receiver has then acknowledged no more than up to its beginning.
 */
EC_INLINE void tcp_note_reset(const struct pkt *pkt, const struct tcp_side *own, const struct tcp_side *peer)
{
	if (pkt->tcp_flags & TCP_RST) {
		if (!tcp_reset_valid(pkt, *own->state, *own->seq_end, *peer->ack, *peer->seq_end))
			return;
		*own->state |= FLOW_RESET;
		*peer->state |= FLOW_RESET;
		*own->ack = *peer->seq_end;
		*peer->ack = *own->seq_end;
		return;
	}
	if (!(pkt->tcp_flags & TCP_ACK) || !(*own->state & FLOW_RESET))
		return;
	if ((__s32)(pkt->ack - *own->ack) <= 0 || (__s32)(pkt->ack - *peer->seq_end) > 0)
		return;
	if ((__s32)(*peer->ack - pkt->seq) > 0)
		*peer->ack = pkt->seq;
	*own->state &= ~(FLOW_RESET | FLOW_CLOSED);
	*peer->state &= ~(FLOW_RESET | FLOW_CLOSED);
}

/*
 * Whether a SYN opens a new connection on the tuple: the last one is closed, or was
 * never answered. For a SYN from the world, a FIN from the world does not count, as
 * anybody may have sent both.
 */
EC_INLINE bool tcp_opens_anew(__u8 own, __u8 peer, bool by_pod)
{
	__u8 closed = by_pod ? own | peer : peer;

	return !peer || (closed & FLOW_FIN) || ((own | peer) & FLOW_RESET);
}

#endif
