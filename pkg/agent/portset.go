package agent

import (
	"fmt"
	"iter"
	"math/bits"
	"slices"
	"strconv"
	"strings"
)

// ports is a set of port numbers.
type ports [1 << 16 / 64]uint64

// parsePorts reads the kernel's notation: "8080,9148-9160".
func parsePorts(s string) (p ports, err error) {
	for part := range strings.SplitSeq(strings.TrimSpace(s), ",") {
		if part == "" {
			continue
		}
		first, last, isRange := strings.Cut(part, "-")
		if !isRange {
			last = first
		}
		low, err1 := strconv.ParseUint(first, 10, 16)
		high, err2 := strconv.ParseUint(last, 10, 16)
		if err1 != nil || err2 != nil {
			return p, fmt.Errorf("%q is not a list of ports", shorten(s, maxValue))
		}
		p.add(uint16(low), uint16(high))
	}
	return p, nil
}

// portsOf is a set of those.
func portsOf(all []uint16) *ports {
	var p ports
	for _, port := range all {
		p.add(port, port)
	}
	return &p
}

func (p *ports) add(low, high uint16) {
	for i := int(low); i <= int(high); i++ {
		p[i/64] |= 1 << (i % 64)
	}
}

func (p *ports) remove(i int) { p[i/64] &^= 1 << (i % 64) }

func (p *ports) has(i int) bool { return p[i/64]&(1<<(i%64)) != 0 }

func (p ports) without(q ports) ports {
	for i := range p {
		p[i] &^= q[i]
	}
	return p
}

func (p ports) with(q ports) ports {
	for i := range p {
		p[i] |= q[i]
	}
	return p
}

func (p ports) and(q ports) ports {
	for i := range p {
		p[i] &= q[i]
	}
	return p
}

func (p ports) count() (n int) {
	for _, word := range p {
		n += bits.OnesCount64(word)
	}
	return n
}

// all are the ports in ascending order.
func (p ports) all() iter.Seq[int] {
	return func(yield func(int) bool) {
		for i := range 1 << 16 {
			if p.has(i) && !yield(i) {
				return
			}
		}
	}
}

// ranges are the ports in as few pieces as there can be, in ascending order.
func (p ports) ranges() (all []PortRange) {
	for i := range p.all() {
		port := uint16(i) //nolint:gosec // a port
		if n := len(all); n > 0 && int(all[n-1].High)+1 == i {
			all[n-1].High = port
		} else {
			all = append(all, PortRange{port, port})
		}
	}
	return all
}

// largest are the ports in the largest pieces, so many at most.
func (p ports) largest(pieces int) (some ports) {
	all := p.ranges()
	slices.SortStableFunc(all, func(a, b PortRange) int { return b.size() - a.size() })
	for _, r := range all[:min(pieces, len(all))] {
		some.add(r.Low, r.High)
	}
	return some
}

// String is the kernel's notation.
func (p ports) String() string {
	var out []string
	for _, r := range p.ranges() {
		if r.Low == r.High {
			out = append(out, fmt.Sprint(r.Low))
		} else {
			out = append(out, r.String())
		}
	}
	return strings.Join(out, ",")
}
