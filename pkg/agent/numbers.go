package agent

import (
	"github.com/ebpf-cni/ebpf-cni/maps/uplinks"
	"github.com/ebpf-cni/ebpf-cni/pkg/plan"
)

// numbers are those that stand for uplinks in the masks of destinations, by index. One keeps its own for as long as it
// is an uplink.
type numbers map[uint32]uint32

// give numbers the uplinks. It reports how many there are beyond those that can be told apart: they share the last number.
func (n numbers) give(links []plan.Link) (beyond int) {
	now := make(map[uint32]bool, len(links))
	for _, l := range links {
		now[l.Index] = true
	}
	for index := range n {
		if !now[index] {
			delete(n, index)
		}
	}
	const last = uplinks.Bits - 1
	var taken [uplinks.Bits]bool
	unnumbered := make([]int, 0, len(links))
	for i, l := range links {
		bit, has := n[l.Index]
		if !has || bit > last || taken[bit] && bit != last { // as an earlier version left them
			unnumbered = append(unnumbered, i)
			continue
		}
		taken[bit], links[i].Bit = true, bit
	}
	for _, i := range unnumbered {
		bit := uint32(0)
		for bit < last && taken[bit] {
			bit++
		}
		n[links[i].Index], taken[bit], links[i].Bit = bit, true, bit
	}
	return max(0, len(links)-uplinks.Bits)
}
