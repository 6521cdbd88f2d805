package prog

import (
	"bytes"
	"encoding/binary"
	"flag"
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/gopacket/gopacket/layers"

	"github.com/ebpf-cni/ebpf-cni/maps/counters"
	"github.com/ebpf-cni/ebpf-cni/maps/drops"
	"github.com/ebpf-cni/ebpf-cni/maps/traffic"
	"github.com/ebpf-cni/ebpf-cni/maps/usage"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/test/priv"
)

var (
	packets = flag.Int("packets", amount(60_000, 250_000), "random packets into each program")
	seed    = flag.Uint64("seed", 1, "of the random packets; 0: another one each time")
)

// amount is how much of something the tests do: in their long form more.
func amount(short, long int) int {
	if priv.Long() {
		return long
	}
	return short
}

// storm is a node under random packets, with what came of them.
type storm struct {
	*bed
	*generator
	buffer  []byte
	out     []byte
	ctx     skb
	actions map[wire.Direction]map[uint32]counters.Value
	sentBy  string // the node that what comes through the tunnel is from
}

// Whatever arrives: only known actions, no checksum broken, nothing of a pod's address towards the world, and counters
// that add up to the packets. All programs work on the same flows, so that they meet what the others have made.
// The gate runs the same packets each time, so that it judges the change and not the dice; make fuzz throws them.
func TestRandomPackets(t *testing.T) {
	if *seed == 0 {
		*seed = uint64(time.Now().UnixNano())
	}
	t.Logf("repeat with -seed=%d -packets=%d", *seed, *packets)
	for name, more := range map[string]option{"alone": withPaths(10 * time.Millisecond), "beside netfilter": besideNetfilter} {
		t.Run(name, func(t *testing.T) {
			rage(newBed(t, inIPv4, withPorts(50000, 50063), withTables(512, 512), more))
		})
	}
}

// rage throws the packets at a node.
func rage(b *bed) {
	b.Helper()
	s := &storm{
		sentBy: node5IP,
		bed:    b, generator: newGenerator(*seed), buffer: make([]byte, 0, 4096), out: make([]byte, 4096),
		actions: make(map[wire.Direction]map[uint32]counters.Value),
	}
	before := make(map[wire.Direction]map[string]counters.Value)
	directions := []wire.Direction{wire.FromPod, wire.FromUplink, wire.ToUplink, wire.FromTunnel, wire.ToTunnel}
	for _, d := range directions {
		before[d], s.actions[d] = b.counters(d), make(map[uint32]counters.Value)
	}
	for i := range *packets {
		for _, d := range directions {
			s.step(d)
		}
		if b.Failed() {
			b.Fatalf("after %d packets into each program", i+1)
		}
		if i%500 == 499 { // make room, and end flows under way
			s.sweep(usage.Snat, time.Duration(s.IntN(300))*time.Second, false)
			s.sweep(usage.Conntrack, time.Duration(s.IntN(300))*time.Second, false)
		}
	}
	for _, d := range directions {
		s.addsUp(d, before[d], b.counters(d))
	}
	s.tablesAgree()
}

// step runs one program on one packet.
func (s *storm) step(d wire.Direction) {
	l, ifindex := s.uplink, s.uplink.index
	if d == wire.FromPod {
		l = s.pods[[]string{podA, podB, podC}[s.IntN(3)]]
		ifindex = l.index
	}
	if d == wire.FromTunnel || d == wire.ToTunnel {
		ifindex = s.tunnel
	}
	if d == wire.FromTunnel && s.IntN(8) == 0 {
		s.sentBy = senders[s.IntN(len(senders))]
		s.comesFrom(s.sentBy, uint32(vni+s.IntN(8)/7))
	}
	frame := s.frame(s.buffer, l.mac)
	s.likely(d, frame, ifindex)
	s.sum(frame)
	s.ctx = skb{}
	s.ctx.set(skbIfindex, uint32(ifindex))
	if s.IntN(16) == 0 {
		s.ctx.set(skbMark, s.Uint32())
	}
	if s.IntN(16) == 0 {
		s.ctx.set(skbGSOSize, uint32(1+s.IntN(2000)))
	}
	options := &ebpf.RunOptions{Data: frame, DataOut: s.out, Context: s.ctx[:]}
	action, err := s.program(d).Run(options)
	if err != nil {
		s.Fatalf("%v: % x: %v", d, frame, err)
	}
	counted := action
	if isReset(frame, options.DataOut) || isTold(frame, options.DataOut) || isTurnedAway(frame, options.DataOut) {
		counted = actShot
	}
	n, size := s.actions[d][counted], len(frame)
	if isAdvertisement(options.DataOut) {
		size = len(options.DataOut) // an answer may be longer than the question
	}
	s.actions[d][counted] = counters.Value{Packets: n.Packets + 1, Bytes: n.Bytes + uint64(size)}
	if err := s.holds(d, frame, options.DataOut, action); err != nil {
		s.Errorf("%v: %v, mark %#x, GSO %d\n in % x\nout % x",
			d, err, s.ctx.get(skbMark), s.ctx.get(skbGSOSize), frame, options.DataOut)
	}
	if action != actShot && s.IntN(4) == 0 {
		s.saw(options.DataOut)
	}
}

// likely gives most frames an address with which they get further than the first check.
func (s *storm) likely(d wire.Direction, frame []byte, ifindex int) {
	f, ok := familyOf(frame)
	if !ok || s.IntN(4) == 0 {
		return
	}
	put := func(at at, names ...string) { copy(at.of(frame), f.ip(names[s.IntN(len(names))]).AsSlice()) }
	pod := []string{podA, podB, podC}[s.IntN(3)]
	switch d {
	case wire.FromPod:
		for pod, l := range s.pods {
			if l.index == ifindex {
				put(sourceAt, pod)
			}
		}
	case wire.FromUplink:
		put(destinationAt, pod, nodeIP, nodeIP)
	case wire.ToUplink:
		put(sourceAt, pod, nodeIP)
	case wire.FromTunnel:
		put(sourceAt, beyond, remote, s.sentBy)
		put(destinationAt, pod, nodeIP)
	case wire.ToTunnel:
		put(destinationAt, beyond, node5IP)
	}
}

// holds says what rule a run has broken.
func (s *storm) holds(d wire.Direction, in, out []byte, action uint32) error {
	if action != actRedirect && action != actShot && action != actUnspec {
		return fmt.Errorf("unknown action %d", int32(action))
	}
	f, ok := familyOf(in)
	if action == actShot || !ok {
		return nil
	}
	if isReset(in, out) || isTurnedAway(in, out) {
		return sumsValid(out)
	}
	if isTold(in, out) {
		return s.toldRightly(in, out)
	}
	if err := sumsKept(in, out); err != nil {
		return err
	}
	switch d {
	case wire.FromTunnel:
		return s.senderOwns(f, out)
	case wire.ToTunnel:
		return s.goesThrough(f, out)
	}
	if action == actRedirect && d == wire.FromPod {
		if err := s.fits(out); err != nil {
			return err
		}
	}
	leaves := action == actRedirect && d == wire.FromPod || action == actUnspec && d == wire.ToUplink && s.ctx.get(skbMark)&mark == 0
	if leaves {
		return s.noPodToWorld(out)
	}
	return nil
}

// pathMTU is that of the way to an address.
func pathMTU(f family, dst string) int {
	if f.within(f.ip(dst), "10.244.5.0/24", node5IP+"/32") {
		return tunnelMTU
	}
	return mtu
}

// fits refuses a packet of a pod that has left the node and is larger than its path.
func (s *storm) fits(out []byte) error {
	v, err := read(out)
	if err != nil || s.ctx.get(skbGSOSize) != 0 {
		return nil
	}
	if _, here := s.pods[v.dst]; !here && len(v.ip) > pathMTU(v.family, v.dst) {
		return fmt.Errorf("%v has left with %d bytes", v, len(v.ip))
	}
	return nil
}

// toldRightly refuses an error about a packet that fits, that may be fragmented, or about which none is due; and another's MTU.
func (s *storm) toldRightly(in, out []byte) error {
	sent, _ := read(in)
	told, _ := read(out)
	limit := pathMTU(sent.family, sent.dst)
	if got := int(binary.BigEndian.Uint16(told.l4[6:])); got != limit {
		return fmt.Errorf("%v: told of %d bytes, want %d", sent, got, limit)
	}
	if len(sent.ip) <= limit && s.ctx.get(skbGSOSize) == 0 {
		return fmt.Errorf("%v is told of, and fits", sent)
	}
	if _, err := sent.quoted(); err == nil {
		return fmt.Errorf("%v is an error, and is answered by one", sent)
	}
	if sent.family == inIPv4 && (sent.later || sent.ip[6]&0x40 == 0) {
		return fmt.Errorf("%v may be fragmented, or is a later fragment", sent)
	}
	return sumsValid(out)
}

// senders are the outer sources of what comes through the tunnel, of which only the nodes' may pass.
var senders = []string{node5IP, node5IP, node2IP, nodeIP, world, podA}

// senderOwns refuses a packet that came through the tunnel from a node whose pod or address the source is not.
func (s *storm) senderOwns(f family, out []byte) error {
	source := addressAt(f, sourceAt.of(out))
	owned := map[string]string{node5IP: "10.244.5.0/24", node2IP: "10.244.2.0/24"}[s.sentBy]
	if owned != "" && f.within(source, s.sentBy+"/32", owned) {
		return nil
	}
	return fmt.Errorf("source %v, though %s has sent it", source, s.sentBy)
}

// goesThrough refuses a packet in the tunnel that no node there is to get, unless one of our programs has sent it.
func (s *storm) goesThrough(f family, out []byte) error {
	to := addressAt(f, destinationAt.of(out))
	if s.ctx.get(skbMark)&mark != 0 || f.within(to, node5IP+"/32", "10.244.2.0/24", "10.244.3.0/24", "10.244.4.0/24", "10.244.5.0/24") {
		return nil
	}
	return fmt.Errorf("no node has %v there", to)
}

// addressAt reads an address of the family.
func addressAt(f family, field []byte) netip.Addr {
	a, _ := netip.AddrFromSlice(field[:f.ip(nodeIP).BitLen()/8])
	return a
}

// within says whether an address is in one of the prefixes that the names stand for.
func (f family) within(a netip.Addr, names ...string) bool {
	return slices.ContainsFunc(names, func(name string) bool { return f.prefix(name).Contains(a) })
}

// isReset says whether a RST to a pod stands in the place of its segment.
func isReset(in, out []byte) bool {
	sent, err := read(in)
	if err != nil || sent.proto != wire.TCP || len(sent.l4) < 20 || sent.l4[13]&rst != 0 {
		return false
	}
	v, err := read(out)
	return err == nil && len(out) == ethernet+v.family.header()+20 && v.proto == wire.TCP && v.String() == reversed(sent) && v.l4[13]&^ack == rst
}

// isTold says whether the error that a packet is too big stands in its place.
func isTold(in, out []byte) bool { return isErrorAbout(in, out, kind{3, 4}) }

// isTurnedAway says whether the error that the host is unreachable does.
func isTurnedAway(in, out []byte) bool { return isErrorAbout(in, out, hostUnreachable) }

func isErrorAbout(in, out []byte, k kind) bool {
	sent, err := read(in)
	if err != nil {
		return false
	}
	quoted := min(len(sent.ip), 128)
	v, err := read(out)
	k = sent.family.kind(k)
	// A packet of IPv6 that says that it has no payload may be a jumbogram, of which more is quoted.
	return err == nil && v.family == sent.family && v.proto == wire.ICMP && v.dst == sent.src && len(v.l4) >= 8+quoted &&
		kind(v.l4[:2]) == k && bytes.HasPrefix(in[14:], v.l4[8:])
}

// noPodToWorld refuses a packet to the world with a pod's address, unless the world has opened its flow.
func (s *storm) noPodToWorld(out []byte) error {
	v, err := read(out)
	if err != nil {
		return nil // malformed: ec_to_uplink leaves what the stack sends of that kind
	}
	if _, ours := s.pods[v.src]; !ours || !isWorld(v.family, v.dst) {
		return nil
	}
	key := v.tuple(v.proto, v.src, v.sport, v.dst, v.dport)
	if v.later {
		first, err := s.firstFragment(key, v.id)
		if err != nil {
			return fmt.Errorf("%v: a later fragment of no datagram: %w", v, err)
		}
		key.Proto, key.Sport, key.Dport = first.Proto, first.Sport, first.Dport
	} else if inner, err := v.quoted(); err == nil {
		key = v.tuple(inner.proto, inner.dst, inner.dport, inner.src, inner.sport)
	}
	if _, err := s.conntrack.Get(key); err != nil {
		return fmt.Errorf("%v left for the world: %w", v, err)
	}
	return nil
}

// cluster is what is not the world.
var cluster = []string{
	"10.244.1.0/24", "10.244.2.0/24", "10.244.3.0/24", "10.244.4.0/24", "10.244.5.0/24", podC + "/32", "10.200.0.0/16",
	nodeIP + "/32", nodeOtherIP + "/32", node2IP + "/32", node5IP + "/32", "169.254.20.10/32",
}

// isWorld says what the node's tables say, in a way of its own. What is sent to a whole link, or stays on one, is not the
// world's.
func isWorld(f family, name string) bool {
	a := f.ip(name)
	if f == inIPv6 && a.IsLinkLocalUnicast() || a.IsMulticast() || a.Is4() && a.As4()[0] >= 224 {
		return false
	}
	return !f.within(a, cluster...)
}

// addsUp holds the counters against the actions that were returned: every packet once, with its bytes.
func (s *storm) addsUp(d wire.Direction, before, after map[string]counters.Value) {
	want, got := s.actions[d], make(map[uint32]counters.Value)
	for name, v := range after {
		if name == traffic.SnatAllocated.String() || name == traffic.SnatRetried.String() {
			continue
		}
		action := actionOf(d, name)
		sum := got[action]
		sum.Packets += v.Packets - before[name].Packets
		sum.Bytes += v.Bytes - before[name].Bytes
		if sum != (counters.Value{}) {
			got[action] = sum
		}
	}
	for _, action := range []uint32{actUnspec, actShot, actRedirect} {
		if got[action] != want[action] {
			s.Errorf("%v: counters say %+v for action %d, it was returned for %+v", d, got[action], int32(action), want[action])
		}
	}
	for r := drops.Invalid; r < drops.Reasons; r++ {
		s.Logf("%v: %d drops %v", d, after["drop "+r.String()].Packets-before["drop "+r.String()].Packets, r)
	}
	for e := range traffic.Events {
		s.Logf("%v: %d %v", d, after[e.String()].Packets-before[e.String()].Packets, e)
	}
}

// tablesAgree asserts that what is left are whole pairs, rightly counted, and that all of it can be collected.
func (s *storm) tablesAgree() {
	forward, tracked := all(s.bed, s.snat), all(s.bed, s.conntrack)
	for out := range forward {
		s.pair(out)
	}
	s.count(len(forward), len(tracked))
	s.sweep(usage.Snat, 2*day, false)
	s.sweep(usage.Conntrack, 2*day, false)
	s.empty()
}

// isAdvertisement says whether a packet is the gateway's answer to a solicitation.
func isAdvertisement(frame []byte) bool {
	v, err := read(frame)
	return err == nil && v.family == inIPv6 && v.src == gateway && v.proto == wire.ICMP && len(v.l4) == 32 && v.l4[0] == layers.ICMPv6TypeNeighborAdvertisement
}
