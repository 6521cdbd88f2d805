package shapes

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/maps/drops"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/test/lab"
	"github.com/ebpf-cni/ebpf-cni/test/priv"
)

// limit is how long to wait for what should come. What should not come is given up when a packet that was sent after it has arrived.
const limit = 3 * time.Second

// Test sends every shape along every path of a network and compares what becomes of each with the table.
func Test(t *testing.T, n Network) {
	t.Helper()
	if err := prepareParties(n); err != nil {
		t.Fatal(err)
	}
	r := &run{network: n, ears: listen(t, n)}
	for _, s := range table {
		if paths := s.paths(&r.network); len(paths) > 0 {
			t.Run(s.name, func(t *testing.T) { r.try(t, s, paths) })
		}
	}
}

// prepareParties lifts everybody's rate limits of ICMP errors.
func prepareParties(n Network) error {
	var failed []error
	for _, party := range n.Parties {
		for _, family := range n.Families {
			name := [wire.Families]string{"net/ipv4/icmp_ratelimit", "net/ipv6/icmp/ratelimit"}[family]
			failed = append(failed, party.WriteSysctl(name, "0"))
		}
	}
	return errors.Join(failed...)
}

// run is the table on its way through a network.
type run struct {
	network Network
	ears    *ears
	last    uint32 // the number of what was sent last
}

// sent is one shape on one path.
type sent struct {
	path
	packet     packet
	number     uint32 // of the packet
	fence      uint32 // and of what was sent after it
	err        error  // of sending, or of an exchange
	isExchange bool
	wanted     outcome
}

func (r *run) try(t *testing.T, s shape, paths []path) {
	t.Helper()
	before := r.counted(t)
	all := make([]*sent, len(paths))
	var exchanges sync.WaitGroup
	for i, p := range paths {
		if p.kind == Reply {
			p = r.reply(t, p)
		}
		all[i] = &sent{path: p, wanted: s.wanted(p), isExchange: s.exchange != nil}
		if s.exchange == nil {
			if p.kind == Answer {
				r.await(t, all[i-1].fence)
			}
			r.send(s, all[i])
			continue
		}
		exchanges.Go(func() {
			ctx, cancel := context.WithTimeout(t.Context(), priv.Patience(limit))
			defer cancel()
			all[i].err = s.exchange(ctx, p)
		})
	}
	exchanges.Wait()
	var wrong []string
	for deadline := time.Now().Add(priv.Patience(limit)); ; time.Sleep(2 * time.Millisecond) {
		wrong = r.differences(t, all, before)
		if len(wrong) == 0 || time.Now().After(deadline) {
			break
		}
	}
	for _, line := range wrong {
		t.Error(line)
	}
}

func (r *run) next() uint32 {
	r.last++
	return r.last
}

// filler is what payloads consist of behind their marker, so that they are never the same.
func filler(number uint32, size int) []byte {
	payload := marker(number)
	for i := len(payload); i < size; i++ {
		payload = append(payload, byte(i*7)^byte(number))
	}
	return payload
}

func (r *run) send(s shape, to *sent) {
	to.number, to.fence = r.next(), r.next()
	to.packet = s.packet(to.path, filler(to.number, 48))
	to.packet.id = uint16(to.number)
	for _, bytes := range to.packet.bytes() {
		to.err = errors.Join(to.err, to.from.SendRaw(bytes))
	}
	after := plain(to.path, filler(to.fence, 48))
	to.err = errors.Join(to.err, to.from.SendRaw(after.bytes()[0]))
}

// plain is a datagram that arrives everywhere.
func plain(p path, payload []byte) packet {
	return packet{from: p.sent[0].Addr(), to: p.sent[1].Addr(), protocol: unix.IPPROTO_UDP, body: datagram(p.sent[0], p.sent[1], payload)}
}

// await waits until something is heard.
func (r *run) await(t *testing.T, number uint32) {
	t.Helper()
	for deadline := time.Now().Add(priv.Patience(limit)); len(r.ears.about(number)) == 0; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("a plain datagram does not arrive")
		}
	}
}

// reply is the path back of a masqueraded flow, which the pod opens by a datagram.
func (r *run) reply(t *testing.T, p path) path {
	t.Helper()
	forth := r.network.path(ToWorld, p.family)
	number := r.next()
	opening := plain(forth, filler(number, 48))
	if err := forth.from.SendRaw(opening.bytes()[0]); err != nil {
		t.Fatal(err)
	}
	r.await(t, number)
	h := r.ears.about(number)[0]
	p.sent = [2]netip.AddrPort{forth.sent[1], netip.AddrPortFrom(h.from, binary.BigEndian.Uint16(h.body))}
	p.received = [2]netip.AddrPort{forth.sent[1], forth.sent[0]}
	return p
}

// differences are what is not as the table has it.
func (r *run) differences(t *testing.T, all []*sent, before map[drops.Reason]uint64) (wrong []string) {
	t.Helper()
	want := maps.Clone(before)
	for _, s := range all {
		want[s.wanted.counted] += s.wanted.packets
		if seen := r.outcome(s); seen != s.wanted.what {
			wrong = append(wrong, fmt.Sprintf("%v: %s, want: %s", s.path, seen, s.wanted.what))
		}
	}
	if r.network.Drops == nil {
		return wrong
	}
	for reason, got := range r.counted(t) {
		// Kernels say things to their link all by themselves, and a fragment too big seldom comes alone.
		more := reason == drops.LinkScope || reason == drops.TooBig && want[reason] > before[reason]
		if got < want[reason] || got > want[reason] && !more {
			wrong = append(wrong, fmt.Sprintf("%d packets are counted as %v, want %d", got-before[reason], reason, want[reason]-before[reason]))
		}
		delete(want, reason)
	}
	for reason, left := range want {
		if left > 0 && reason != drops.None {
			wrong = append(wrong, fmt.Sprintf("no packets are counted as %v, want %d", reason, left))
		}
	}
	return wrong
}

func (r *run) counted(t *testing.T) map[drops.Reason]uint64 {
	t.Helper()
	if r.network.Drops == nil {
		return map[drops.Reason]uint64{}
	}
	counted, err := r.network.Drops()
	if err != nil {
		t.Fatal(err)
	}
	return counted
}

// outcome says in the table's words what has become of something so far.
func (r *run) outcome(s *sent) string {
	if s.isExchange {
		return r.told(s.path, s.err)
	}
	if s.err != nil {
		return s.err.Error()
	}
	var arrivedAt, problems []string
	for _, h := range r.ears.about(s.number) {
		switch {
		case h.problem != nil:
			problems = append(problems, r.problem(s.path, h))
		case s.isIn(h) && h.by != ends[s.kind].from: // who sends to a group hears itself
			arrivedAt = append(arrivedAt, h.by+s.flaw(h))
		}
	}
	slices.Sort(arrivedAt)
	arrivedAt = slices.Compact(arrivedAt)
	to := ends[s.kind].to
	switch {
	case slices.Equal(arrivedAt, []string{to}):
		return arrived
	case len(arrivedAt) > 0:
		return arrived + " at " + strings.Join(arrivedAt, ", ")
	case len(problems) > 0:
		return strings.Join(slices.Compact(problems), "; ")
	case len(r.ears.about(s.fence)) == 0:
		return "lost, as what was sent after it"
	}
	return lost
}

// told is the outcome of an exchange.
func (r *run) told(p path, err error) string {
	if err == nil {
		return arrived
	}
	if e, ok := errors.AsType[*lab.ICMPError](err); ok {
		return r.problem(p, heard{by: ends[p.kind].from, from: e.From, problem: &icmpError{e.ICMPKind, e.MTU, e.InnerSource, e.InnerDestination}})
	}
	if errors.Is(err, unix.EMSGSIZE) {
		return tooBigHere
	}
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return lost
	}
	return err.Error()
}

// problem describes an ICMP error, and what is wrong about it besides.
func (r *run) problem(p path, h heard) string {
	c, name := h.problem, r.network.Names[h.from]
	if name == "" {
		name = h.from.String()
	}
	what := fmt.Sprintf("ICMP error %d/%d", c.Type, c.Code)
	switch c.ICMPKind {
	case lab.TooBig[p.family]:
		what = fmt.Sprintf("%s (%d)", tooBig, c.mtu)
	case lab.TimeExceeded[p.family]:
		what = timeExceeded
	case lab.HostUnreachable[p.family]:
		what = unreachable
	}
	text := what + " from " + name
	if r.network.Names[c.source] != ends[p.kind].from || c.quoteTo != p.sent[1].Addr() {
		text += fmt.Sprintf(" about %s > %s", c.source, c.quoteTo)
	}
	if h.by != ends[p.kind].from {
		text += " to " + h.by
	}
	return text
}

// isIn says whether a packet that was heard is what was sent, and not what carries it through a tunnel.
func (s *sent) isIn(h heard) bool {
	_, at := numberIn(h.body)
	_, want := numberIn(s.packet.body)
	return h.protocol == s.packet.protocol && at == want
}

// flaw is how something that has arrived is not what was sent; empty if it is.
func (s *sent) flaw(h heard) string {
	var flaws []string
	body, source := slices.Clone(h.body), s.received[0]
	if h.from != source.Addr() {
		source = netip.AddrPortFrom(h.from, 0)
		flaws = append(flaws, "as "+s.network.Names[h.from])
	}
	switch s.packet.protocol {
	case unix.IPPROTO_UDP:
		flaws = append(flaws, s.udpFlaws(source, body)...)
	case unix.IPPROTO_SCTP:
		if source.Port() == 0 {
			copy(body, s.packet.body[:2])
			copy(body[sctpSum:], make([]byte, 4))
			binary.LittleEndian.PutUint32(body[sctpSum:], crc(body))
			flaws = append(flaws, portFlaws(h.body, netip.AddrPort{}, s.received[1])...)
		}
	}
	if string(body) != string(s.packet.body) {
		flaws = append(flaws, "with another content")
	}
	if !contains(h.options, s.packet.options, s.family) {
		flaws = append(flaws, "without its options")
	}
	if len(flaws) == 0 {
		return ""
	}
	return " " + strings.Join(flaws, ", ")
}

// udpFlaws compares what may differ on the way, checksum and ports, and makes it what was sent.
func (s *sent) udpFlaws(source netip.AddrPort, body []byte) (flaws []string) {
	zero := s.packet.body[udpSum] == 0 && s.packet.body[udpSum+1] == 0
	switch isZero := body[udpSum] == 0 && body[udpSum+1] == 0; {
	case zero != isZero:
		flaws = append(flaws, "with a checksum that comes or goes")
	case !zero && sum(source.Addr(), s.destination(), unix.IPPROTO_UDP, body) != 0xffff:
		flaws = append(flaws, "with a wrong checksum")
	}
	flaws = append(flaws, portFlaws(body, source, s.received[1])...)
	copy(body, s.packet.body[:4])
	copy(body[udpSum:], s.packet.body[udpSum:udpHeader])
	return flaws
}

// portFlaws compares ports; a source of port 0 may have any.
func portFlaws(body []byte, source, to netip.AddrPort) (flaws []string) {
	if port := binary.BigEndian.Uint16(body); source.Port() != 0 && port != source.Port() {
		flaws = append(flaws, fmt.Sprintf("from port %d", port))
	}
	if port := binary.BigEndian.Uint16(body[2:]); port != to.Port() {
		flaws = append(flaws, fmt.Sprintf("to port %d", port))
	}
	return flaws
}

// destination is what a packet arrives with: the receiver's address, or the group.
func (s *sent) destination() netip.Addr {
	if s.kind == ToGroup {
		return s.packet.to
	}
	return s.received[1].Addr()
}

// contains says whether options have arrived: those of IPv4 by their kind and length, as hops write into them, and those of
// IPv6 among what the kernel says beside a packet.
func contains(received, options []byte, family wire.Family) bool {
	if family == wire.IPv4 {
		return len(received) == len(options) && (len(options) == 0 || received[0] == options[0])
	}
	return len(options) == 0 || strings.Contains(string(received), string(options[1:]))
}
