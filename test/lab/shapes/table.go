package shapes

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/maps/drops"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/test/lab"
	"github.com/ebpf-cni/ebpf-cni/test/priv"
)

const (
	timeExceeded = "time exceeded"
	unreachable  = "host unreachable"
	tooBig       = "too big"
	tooBigHere   = "too big for the sender's interface"
)

// Which paths a shape is sent along.
var (
	echoed    = []Kind{SameNode, Across, ToNode, FromNode, ToOtherNode, ToWorld, FromWorld}
	oneWay    = slices.Concat(echoed, []Kind{Answer}) // behind FromWorld, which opens the flow
	datagrams = slices.Concat(oneWay, []Kind{Reply})
	toGroup   = []Kind{ToGroup}
)

// protocols are those that are listened for.
var protocols = []uint8{unix.IPPROTO_UDP, unix.IPPROTO_SCTP, unix.IPPROTO_GRE, unix.IPPROTO_ESP, unix.IPPROTO_IPIP, unix.IPPROTO_IPV6, experimental}

var (
	only4 = new(wire.IPv4)
	only6 = new(wire.IPv6)
)

// groups are those that everybody joins, broadcast what needs no joining.
var (
	groups = [wire.Families][]netip.Addr{
		wire.IPv4: {netip.MustParseAddr("224.0.0.251"), netip.MustParseAddr("239.1.2.3")},
		wire.IPv6: {netip.MustParseAddr("ff02::fb"), netip.MustParseAddr("ff0e::1234")},
	}
	limitedBroadcast = netip.MustParseAddr("255.255.255.255")
)

// Why outcomes differ from those in classical networks.
const (
	byAddress   = "by the address alone one flow of a protocol can be told from others, not two; which pod gets an answer must not depend on who was first"
	reassembled = "netfilter reassembles datagrams, which takes memory that any sender can fill"
	sharedLink  = "a pod is alone on its link, where a bridge lets each pod of a node reach all others"
)

var table = []shape{
	{name: "ping", kinds: echoed, exchange: ping(lab.PingOptions{})},
	{name: "ping of 65000 bytes", kinds: echoed, exchange: learning(ping(lab.PingOptions{Size: 65000})), want: learnt},
	{name: "ping that just fits", kinds: echoed, exchange: pingOfMTU(0)},
	{name: "ping that does not fit", kinds: echoed, exchange: pingOfMTU(1), want: doesNotFit},
	{name: "UDP of 65000 bytes", kinds: echoed, exchange: learning(echoUDP)},

	{name: "fragments in order", kinds: datagrams, packet: fragments(0, 1, 2)},
	{name: "first fragment last", kinds: datagrams, packet: fragments(1, 2, 0), want: needsPorts, beside: needsPortsOfReplies, classical: always(arrives), why: reassembled},

	{name: "one hop left", kinds: datagrams, packet: lastHops(1, plain), want: runsOut(1)},
	{name: "two hops left", kinds: datagrams, packet: lastHops(2, plain), want: runsOut(2)},

	{name: "UDP without a checksum", kinds: datagrams, packet: withoutSum},

	{name: "SCTP", kinds: oneWay, packet: sctp, want: unknownProtocol, classical: always(arrives), why: byAddress},
	{name: "GRE", kinds: oneWay, packet: of(unix.IPPROTO_GRE, gre), want: unknownProtocol, classical: oneFlowOfTwo, why: byAddress},
	{name: "ESP", kinds: oneWay, packet: of(unix.IPPROTO_ESP, esp), want: unknownProtocol, classical: oneFlowOfTwo, why: byAddress},
	{name: "IPv4 within", kinds: oneWay, packet: of(unix.IPPROTO_IPIP, within("192.0.2.1", "192.0.2.2")), want: unknownProtocol, classical: oneFlowOfTwo, why: byAddress},
	{name: "IPv6 within", kinds: oneWay, packet: of(unix.IPPROTO_IPV6, within("2001:db8::1", "2001:db8::2")), want: unknownProtocol, classical: oneFlowOfTwo, why: byAddress},
	{name: "protocol 253", kinds: oneWay, packet: of(experimental, func(payload []byte) []byte { return payload }), want: unknownProtocol, classical: oneFlowOfTwo, why: byAddress},

	{name: "record route", family: only4, kinds: datagrams, packet: options4(7, 11, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0)},
	{name: "timestamp", family: only4, kinds: datagrams, packet: options4(68, 8, 5, 0, 0, 0, 0, 0)},
	{name: "router alert", family: only4, kinds: datagrams, packet: options4(148, 4, 0, 0)},
	{name: "no operation", family: only4, kinds: datagrams, packet: options4(1, 1, 1, 1)},
	{name: "loose source route", family: only4, kinds: datagrams, packet: options4(131, 7, 4, 192, 0, 2, 1, 0), want: always(isLost)},

	{name: "two hops left, with options", family: only4, kinds: datagrams, packet: lastHops(2, options4(1, 1, 1, 1)), want: runsOut(2)},

	{name: "hop-by-hop padding", family: only6, kinds: datagrams, packet: options6(unix.IPPROTO_HOPOPTS, 1, 4, 0, 0, 0, 0)},
	{name: "hop-by-hop router alert", family: only6, kinds: datagrams, packet: options6(unix.IPPROTO_HOPOPTS, 5, 2, 0, 0, 1, 0)},
	{name: "destination options", family: only6, kinds: datagrams, packet: options6(unix.IPPROTO_DSTOPTS, 1, 4, 0, 0, 0, 0)},

	{
		name: "two hops left, with hop-by-hop options", family: only6, kinds: datagrams,
		packet: lastHops(2, options6(unix.IPPROTO_HOPOPTS, 1, 4, 0, 0, 0, 0)), want: runsOut(2),
	},

	{name: "multicast on the link", family: only4, kinds: toGroup, packet: group(groups[wire.IPv4][0]), classical: onBridge(""), why: sharedLink},
	{name: "multicast", family: only4, kinds: toGroup, packet: group(groups[wire.IPv4][1]), classical: onBridge(""), why: sharedLink},
	{name: "multicast on the link, IPv6", family: only6, kinds: toGroup, packet: group(groups[wire.IPv6][0]), want: always(dropped(drops.LinkScope, 1)), classical: onBridge(""), why: sharedLink},
	{name: "multicast, IPv6", family: only6, kinds: toGroup, packet: group(groups[wire.IPv6][1]), classical: onBridge(""), why: sharedLink},
	{name: "limited broadcast", family: only4, kinds: toGroup, packet: group(limitedBroadcast), classical: onBridge(" as node"), why: sharedLink},
	{name: "broadcast of the nodes' subnet", family: only4, kinds: toGroup, packet: func(p path, payload []byte) packet { return group(p.network.Broadcast)(p, payload) }},
}

func always(o outcome) func(path) outcome { return func(path) outcome { return o } }

func ping(o lab.PingOptions) func(context.Context, path) error {
	return func(ctx context.Context, p path) error {
		_, err := p.from.Ping(ctx, p.sent[1].Addr(), o)
		return err
	}
}

// learning repeats an exchange until its ends know the path's MTU: in IPv6 only a sender makes fragments, and somebody on the way has to
// tell it how large.
func learning(exchange func(context.Context, path) error) func(context.Context, path) error {
	return func(ctx context.Context, p path) error {
		for {
			once, cancel := context.WithTimeout(ctx, priv.Patience(200*time.Millisecond))
			err := exchange(once, p)
			cancel()
			if err == nil || ctx.Err() != nil {
				return err
			}
		}
	}
}

// learnt: of what does not fit the tunnel the programs tell the pod, once or for each fragment.
func learnt(p path) outcome {
	if p.family == wire.IPv6 && p.byTunnel() {
		return outcome{what: arrived, counted: drops.TooBig, packets: 1}
	}
	return arrives
}

// pingOfMTU sends a packet that is so many bytes larger than the path's MTU, from a socket that ignores what the host has learnt of that.
func pingOfMTU(more int) func(context.Context, path) error {
	return func(ctx context.Context, p path) error {
		headers := [wire.Families]int{wire.IPv4: 28, wire.IPv6: 48}[p.family]
		_, err := p.from.Ping(ctx, p.sent[1].Addr(), lab.PingOptions{Size: p.width().MTU - headers + more, DontFragment: true})
		return err
	}
}

func doesNotFit(p path) outcome {
	if w := p.width(); w.Says != "" {
		o := answered(fmt.Sprintf("%s (%d)", tooBig, w.MTU), w.Says)
		if p.byTunnel() {
			o.counted, o.packets = drops.TooBig, 1
		}
		return o
	}
	return outcome{what: tooBigHere}
}

func echoUDP(ctx context.Context, p path) error {
	to := p.network.Parties[ends[p.kind].to]
	server, err := to.Serve(0)
	if err != nil {
		return err
	}
	defer server.Close()
	_, err = p.from.UDP(ctx, netip.AddrPortFrom(p.sent[1].Addr(), server.Port), 65000)
	return err
}

// fragments cuts a datagram into three.
func fragments(order ...int) func(path, []byte) packet {
	return func(p path, payload []byte) packet {
		d := plain(p, append(payload, make([]byte, 3000)...))
		cuts := [][2]int{{0, 1000}, {1000, 2000}, {2000, len(d.body)}}
		for _, i := range order {
			d.pieces = append(d.pieces, cuts[i])
		}
		return d
	}
}

// needsPorts: only the first fragment has ports, and where those are needed the others are lost without it. Nobody knows
// whose they are that come to a node from its uplink, so the stack gets them, and counted they are in any case.
func needsPorts(p path) outcome {
	switch {
	case p.kind == ToWorld || p.kind == Answer || p.kind == Reply:
		return dropped(drops.FragNotFound, 2)
	case p.kind == ToOtherNode && !p.byTunnel():
		return outcome{what: arrived, counted: drops.FragNotFound, packets: 2}
	}
	return arrives
}

// needsPortsOfReplies: what walks the stack beside netfilter is put together there, and leaves in order.
func needsPortsOfReplies(p path) outcome {
	if p.kind == Reply {
		return needsPorts(p)
	}
	return arrives
}

func lastHops(left uint8, whole func(path, []byte) packet) func(path, []byte) packet {
	return func(p path, payload []byte) packet {
		d := whole(p, payload)
		d.hops = left
		return d
	}
}

func runsOut(ttl int) func(path) outcome {
	return func(p path) outcome {
		if hop := p.hop(ttl); hop != "" {
			return answered(timeExceeded, hop)
		}
		return arrives
	}
}

func withoutSum(p path, payload []byte) packet {
	d := plain(p, payload)
	d.body[udpSum], d.body[udpSum+1] = 0, 0
	return d
}

func of(protocol uint8, body func([]byte) []byte) func(path, []byte) packet {
	return func(p path, payload []byte) packet {
		return packet{from: p.sent[0].Addr(), to: p.sent[1].Addr(), protocol: protocol, body: body(payload)}
	}
}

// unknownProtocol: without ports there is nothing to masquerade by. Of what netfilter may have translated the sender can't be told.
func unknownProtocol(p path) outcome {
	switch {
	case p.kind != ToWorld:
		return arrives
	case p.network.Style == Programs:
		return outcome{what: answered(unreachable, "node").what, counted: drops.UnknownProtocol, packets: 1}
	}
	return dropped(drops.UnknownProtocol, 1)
}

// oneFlowOfTwo: netfilter masquerades by the address alone, and then cannot tell from that flow what the world opens.
func oneFlowOfTwo(p path) outcome {
	switch p.kind {
	case FromWorld:
		return isLost
	case Answer:
		return outcome{what: arrived + " at " + Outside + " as " + Node}
	}
	return arrives
}

func sctp(p path, payload []byte) packet {
	return of(unix.IPPROTO_SCTP, func(payload []byte) []byte { return sctpInit(p.sent[0].Port(), p.sent[1].Port(), payload) })(p, payload)
}

// onBridge: the pods of the node get it as the node does; as is whose address they see, if not the sender's.
func onBridge(as string) func(path) outcome {
	return func(p path) outcome {
		if !p.network.Bridged {
			return arrives
		}
		return outcome{what: arrived + " at " + NearPod + as + ", " + Node + as}
	}
}

// options4 are padded by ends of the list.
func options4(options ...byte) func(path, []byte) packet {
	for len(options)%4 != 0 {
		options = append(options, 0)
	}
	return func(p path, payload []byte) packet {
		d := plain(p, payload)
		d.options = options
		return d
	}
}

// options6 is an extension header with options of six bytes.
func options6(header uint8, options ...byte) func(path, []byte) packet {
	return func(p path, payload []byte) packet {
		d := plain(p, payload)
		d.first, d.options = header, append([]byte{d.protocol, 0}, options...)
		return d
	}
}

func group(to netip.Addr) func(path, []byte) packet {
	return func(p path, payload []byte) packet {
		at := [2]netip.AddrPort{p.sent[0], netip.AddrPortFrom(to, toPort)}
		return packet{from: p.sent[0].Addr(), to: to, protocol: unix.IPPROTO_UDP, body: datagram(at[0], at[1], payload)}
	}
}
