package device

import (
	"context"
	"errors"
	"net/netip"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/ebpf-cni/ebpf-cni/test/priv"
)

// While a listener that was too slow reads what has waited for it, the kernel drops what is new, and says no word of that. So it
// hears of a loss once more when it has read all: what it has found on the first word may be older than what was dropped.
func TestLossIsToldAgainOnceAllIsRead(t *testing.T) {
	h, lo := inside(t)
	ctx, cancel := context.WithTimeout(t.Context(), priv.Patience(30*time.Second))
	defer cancel()
	dropped, flood := netip.MustParsePrefix("10.9.0.9/32"), netip.MustParsePrefix("10.9.0.1/32")
	// Each change is told by messages of more than 500 bytes with the kernel's own, so this many exceed the buffer.
	const changes = receiveBuffer / 500
	var told []EventKind // but for what waited when it overflowed
	err := Watch(ctx, func(e Event) {
		switch {
		case e.Kind == Lost && len(told) == 0: // the subscription stands
			told = append(told, e.Kind)
			for range changes {
				must(t, h.AddAddress(lo, flood))
				must(t, h.nl.AddrDel(byIndex(lo), &netlink.Addr{IPNet: ipNet(flood)}))
			}
		case e.Kind == Lost:
			if told = append(told, e.Kind); len(told) == 2 {
				must(t, h.AddAddress(lo, dropped))
				return
			}
			cancel()
		case e.Kind == AddressEvent && e.Address.Prefix == dropped:
			told = append(told, e.Kind)
		}
	})
	if len(told) != 3 || told[2] != Lost || !errors.Is(err, context.Canceled) {
		t.Errorf("told of %v, error %v; want to be told of a loss when the subscription stands, when the buffer overflows and when it is read", told, err)
	}
}
