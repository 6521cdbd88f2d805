package agent

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"slices"
	"strings"

	"github.com/ebpf-cni/ebpf-cni/pkg/device"
)

const (
	ipForward     = "net/ipv4/ip_forward"
	reservedPorts = "net/ipv4/ip_local_reserved_ports"
)

func forwardingOf(link string) string { return "net/ipv4/conf/" + link + "/forwarding" }

// sysctls keeps the few settings that the dataplane needs.
type sysctls struct {
	device.Sysctl
	record *record
	log    *slog.Logger
}

// ensure gives a setting a value, and remembers what it had before us.
func (s sysctls) ensure(name, value string) error {
	have, err := s.Get(name)
	if err != nil || have == value {
		return err
	}
	before := have
	if known, again := s.record.Sysctls[name]; again {
		before = known.Before
	}
	return s.change(name, have, setting{Before: before, Ours: value})
}

// change sets a value once the record has what was there before.
func (s sysctls) change(name, have string, to setting) error {
	s.record.Sysctls[name] = to
	if err := s.record.write(); err != nil {
		return err
	}
	if _, err := s.Set(name, to.Ours); err != nil {
		return err
	}
	s.log.Info("sysctl set", "name", name, "value", to.Ours, "was", have)
	return nil
}

// ensureForwarding turns forwarding on, globally and on the uplinks.
func (s sysctls) ensureForwarding(uplinks []string) error {
	errs := []error{s.ensure(ipForward, "1")}
	for _, name := range uplinks {
		if err := s.ensure(forwardingOf(name), "1"); !errors.Is(err, fs.ErrNotExist) { // gone meanwhile
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// reserve keeps the kernel from giving ports of the range to sockets that ask
// for any. What else is reserved stays; an earlier range of ours goes.
func (s sysctls) reserve(low, high uint16) error {
	have, now, err := s.reserved()
	if err != nil {
		return err
	}
	others := now.without(addedBy(s.record.Sysctls[reservedPorts]))
	want := others
	want.add(low, high)
	if want == now {
		return nil
	}
	return s.change(reservedPorts, have, setting{Before: others.String(), Ours: want.String()})
}

// reserved reads the ports that are reserved now.
func (s sysctls) reserved() (text string, p ports, err error) {
	if text, err = s.Get(reservedPorts); err != nil {
		return text, p, err
	}
	if p, err = parsePorts(text); err != nil {
		return text, p, fmt.Errorf("sysctl %s: %w", reservedPorts, err)
	}
	return text, p, nil
}

// ensurePorts reserves the range again when somebody has written another list: a
// service that applies its own settings does not know of ours.
func (s sysctls) ensurePorts(low, high uint16) error {
	if have, err := s.Get(reservedPorts); err == nil && have == s.record.Sysctls[reservedPorts].Ours {
		return nil // as it nearly always is, and cheap to see
	}
	return s.reserve(low, high)
}

// addedBy are the ports that we reserved and nobody before us.
func addedBy(s setting) ports {
	ours, err1 := parsePorts(s.Ours)
	before, err2 := parsePorts(s.Before)
	if err1 != nil || err2 != nil {
		return ports{}
	}
	return ours.without(before)
}

// restore puts back what still has our value. ip_forward stays on, and so does
// what the kernel changed along with it.
func (s sysctls) restore() error {
	var errs []error
	forwarded, on := s.record.Sysctls[ipForward]
	on = on && forwarded.Before == "0"
	for name, v := range s.record.Sysctls {
		switch {
		case name == ipForward:
			s.log.Info("sysctl left as it is: others may rely on it by now", "name", name, "value", v.Ours)
		case on && strings.HasSuffix(name, "/forwarding"):
			s.log.Debug("sysctl left as ip_forward made it", "name", name)
		case name == reservedPorts:
			errs = append(errs, s.unreserve(v))
		default:
			errs = append(errs, s.putBack(name, v))
		}
	}
	return errors.Join(errs...)
}

func (s sysctls) putBack(name string, v setting) error {
	have, err := s.Get(name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if have != v.Ours {
		s.log.Info("sysctl left as it is: somebody else has set it since", "name", name, "value", have, "ours", v.Ours)
		return nil
	}
	_, err = s.Set(name, asLine(v.Before))
	return err
}

// asLine ends a value with a newline: the kernel ignores a write of nothing.
func asLine(value string) string { return value + "\n" }

// unreserve takes out what we added; what others added since stays.
func (s sysctls) unreserve(v setting) error {
	have, now, err := s.reserved()
	if err != nil {
		return err
	}
	added := addedBy(v)
	if added.without(now) != (ports{}) {
		s.log.Info("sysctl left as it is: somebody else has set it since", "name", reservedPorts, "value", have, "ours", v.Ours)
		return nil
	}
	_, err = s.Set(reservedPorts, asLine(now.without(added).String()))
	return err
}

// ports is a set of port numbers.
type ports [1 << 16 / 64]uint64

// parsePorts reads the kernel's notation: "8080,9148-9160".
func parsePorts(s string) (p ports, err error) {
	for part := range strings.SplitSeq(strings.TrimSpace(s), ",") {
		if part == "" {
			continue
		}
		var low, high uint16
		if n, err := fmt.Sscanf(part, "%d-%d", &low, &high); n == 1 {
			high = low
		} else if err != nil {
			return p, fmt.Errorf("%q is not a list of ports", s)
		}
		p.add(low, high)
	}
	return p, nil
}

func (p *ports) add(low, high uint16) {
	for i := int(low); i <= int(high); i++ {
		p[i/64] |= 1 << (i % 64)
	}
}

func (p ports) has(i int) bool { return p[i/64]&(1<<(i%64)) != 0 }

func (p ports) without(q ports) ports {
	for i := range p {
		p[i] &^= q[i]
	}
	return p
}

// String is the kernel's notation.
func (p ports) String() string {
	var out []string
	for i := 0; i < 1<<16; i++ {
		if !p.has(i) {
			continue
		}
		low := i
		for i+1 < 1<<16 && p.has(i+1) {
			i++
		}
		if i == low {
			out = append(out, fmt.Sprint(low))
		} else {
			out = append(out, fmt.Sprintf("%d-%d", low, i))
		}
	}
	return strings.Join(slices.Clip(out), ",")
}
