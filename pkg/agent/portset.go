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
