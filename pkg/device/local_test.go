package device

import (
	"context"
	"errors"
	"net/netip"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/test/priv"
)

// inside opens a handle in a namespace of the test's own, in which loopback is up.
func inside(t *testing.T) (h *Handle, loopback int) {
	t.Helper()
	priv.Isolate(t)
	h, err := Open()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(h.Close)
	lo, err := h.LinkByName("lo")
	if err != nil {
		t.Fatal(err)
	}
	if err := h.SetUp(lo.Index); err != nil {
		t.Fatal(err)
	}
	return h, lo.Index
}

func TestLocalOfRoutesToo(t *testing.T) {
	h, lo := inside(t)
	for _, a := range []string{"169.254.20.10/32", "10.9.0.1/24"} {
		if err := h.AddAddress(lo, netip.MustParsePrefix(a)); err != nil {
			t.Fatal(err)
		}
	}
	anyIP := &netlink.Route{
		Dst: ipNet(netip.MustParsePrefix("10.8.0.0/16")), LinkIndex: lo, Type: unix.RTN_LOCAL, Table: unix.RT_TABLE_LOCAL, Scope: netlink.SCOPE_HOST,
	}
	if err := h.nl.RouteReplace(anyIP); err != nil {
		t.Fatal(err)
	}
	have, _, err := h.LocalTable(IPv4)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"127.0.0.0/8", "169.254.20.10/32", "10.9.0.1/32", "10.8.0.0/16"} {
		if !slices.Contains(have, netip.MustParsePrefix(want)) {
			t.Errorf("%s is missing in %v", want, have)
		}
	}
	if broadcast := netip.MustParsePrefix("10.9.0.255/32"); slices.Contains(have, broadcast) {
		t.Errorf("%s is not local", broadcast)
	}
}

// The host's own addresses and those of everybody on its links, in both families.
func TestLocalTable(t *testing.T) {
	h, _ := inside(t)
	sys := Sysctl{Dir: "/proc/sys"}
	attrs := netlink.NewLinkAttrs()
	attrs.Name = "eth0"
	must(t, h.nl.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: "far"}))
	link, err := h.LinkByName("eth0")
	must(t, err)
	far, err := h.LinkByName("far")
	must(t, err)
	must(t, h.SetUp(far.Index))
	_, err = sys.Set("net/ipv6/conf/all/forwarding", "1") // only a router has the anycast address
	must(t, err)
	must(t, h.SetUp(link.Index))
	must(t, h.WaitRunning(t.Context(), link.Index))
	for _, a := range []string{"10.9.0.1/24", "fd00:9::1/64"} {
		must(t, h.AddAddress(link.Index, netip.MustParsePrefix(a)))
	}
	for family, want := range map[int][2]string{IPv4: {"10.9.0.1/32", "10.9.0.255/32"}, IPv6: {"fd00:9::1/128", "fd00:9::/128"}} {
		local, shared, err := h.LocalTable(family)
		for end := time.Now().Add(priv.Patience(5 * time.Second)); err == nil && len(shared) == 0 && time.Now().Before(end); time.Sleep(time.Millisecond) {
			local, shared, err = h.LocalTable(family) // the kernel takes an address of IPv6 into it a moment later
		}
		must(t, err)
		if !slices.Contains(local, netip.MustParsePrefix(want[0])) || !slices.Contains(shared, netip.MustParsePrefix(want[1])) || len(local) == 0 {
			t.Errorf("local %v, of everybody %v; want %v", local, shared, want)
		}
		if other := IPv4 + IPv6 - family; slices.ContainsFunc(local, func(p netip.Prefix) bool { return p.Addr().Is4() == (other == IPv4) }) {
			t.Errorf("local %v has another family than %d", local, family)
		}
	}
}

// What is deprecated is no address for new connections while there is another.
func TestDeprecatedAddresses(t *testing.T) {
	h, lo := inside(t)
	for text, flags := range map[string]int{"fd00:9::1/128": 0, "fd00:9::2/128": unix.IFA_F_DEPRECATED} {
		a := &netlink.Addr{IPNet: cidr(text), Flags: unix.IFA_F_NODAD}
		if flags != 0 {
			a.PreferedLft, a.ValidLft = 0, 1000
		}
		must(t, h.nl.AddrAdd(byIndex(lo), a))
	}
	all, err := h.Addresses()
	must(t, err)
	deprecated := map[string]bool{}
	for _, a := range all {
		deprecated[a.Prefix.String()] = a.Deprecated
	}
	if deprecated["fd00:9::1/128"] || !deprecated["fd00:9::2/128"] {
		t.Errorf("deprecated: %v", deprecated)
	}
}

func TestWatch(t *testing.T) {
	h, lo := inside(t)
	ctx, cancel := context.WithTimeout(t.Context(), priv.Patience(5*time.Second))
	defer cancel()
	done := make(chan struct{})
	go func() { // the handle's socket is inside, wherever this goroutine runs
		defer close(done)
		address := netip.MustParsePrefix("10.9.0.1/32")
		for ctx.Err() == nil {
			_ = h.AddAddress(lo, address)
			_ = h.nl.AddrDel(byIndex(lo), &netlink.Addr{IPNet: ipNet(address)})
		}
	}()
	noticed := false
	var kinds []EventKind
	err := Watch(ctx, func(e Event) {
		if kinds = append(kinds, e.Kind); e.Kind == AddressEvent {
			noticed = true
			cancel()
		}
	})
	if len(kinds) == 0 || kinds[0] != Lost {
		t.Errorf("what came before is not called lost: %v", kinds)
	}
	<-done
	if !noticed || !errors.Is(err, context.Canceled) {
		t.Errorf("noticed %v, error %v", noticed, err)
	}
}

// A link's settings are listed as its files say.
func TestSettings(t *testing.T) {
	h, loopback := inside(t)
	files := Sysctl{Dir: "/proc/sys"}
	for _, want := range []Settings{{Index: loopback, Forwarding: 1, RPFilter: 2}, {Index: loopback, RPFilter: 1}} {
		for name, value := range map[string]int{"forwarding": want.Forwarding, "rp_filter": want.RPFilter} {
			if _, err := files.Set("net/ipv4/conf/lo/"+name, strconv.Itoa(value)); err != nil {
				t.Fatal(err)
			}
		}
		if all, err := h.Settings(); err != nil || all[loopback] != want {
			t.Errorf("settings %+v, error %v; want %+v", all, err, want)
		}
		if _, err := files.Set("net/ipv4/ip_forward", strconv.Itoa(want.Forwarding)); err != nil {
			t.Fatal(err)
		}
		if all, err := h.Settings(); err != nil || all[AllLinks].Forwarding != want.Forwarding || all[loopback].Forwarding != want.Forwarding {
			t.Errorf("with ip_forward %d: settings %+v, error %v", want.Forwarding, all, err)
		}
	}
}

func TestWatchEndsAtOnce(t *testing.T) {
	inside(t)
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	started := time.Now()
	if err := Watch(ctx, func(Event) {}); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("error %v", err)
	}
	if took := time.Since(started); took > priv.Patience(2*time.Second) {
		t.Errorf("ended after %v", took)
	}
}
