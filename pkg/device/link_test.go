package device

import (
	"bytes"
	"errors"
	"net"
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

func TestCreateVethGivesBothEndsTheirAttributes(t *testing.T) {
	p := newPair(t)
	for _, l := range []struct {
		link Link
		mac  net.HardwareAddr
	}{{p.link, macA}, {p.peer, macB}} {
		if l.link.MTU != 1400 || !bytes.Equal(l.link.MAC, l.mac) || l.link.Kind != "veth" || l.link.Up() {
			t.Errorf("link %+v, want a veth with mtu 1400, mac %s, created down", l.link, l.mac)
		}
	}
	if p.link.PeerIndex != p.peer.Index {
		t.Errorf("peer index %d, want %d", p.link.PeerIndex, p.peer.Index)
	}
	up, err := p.host.LinkByIndex(p.link.Index)
	must(t, err)
	if !up.Up() {
		t.Error("link is not up after SetUp")
	}
	must(t, p.host.SetDown(p.link.Index))
	if down, err := p.host.LinkByIndex(p.link.Index); err != nil || down.Up() {
		t.Errorf("after SetDown: %+v, %v", down, err)
	}
}

func TestCreateVethReportsATakenName(t *testing.T) {
	p := newPair(t)
	other := Veth{Name: "eccni0", MAC: macA, PeerName: "eth1", PeerMAC: macB, PeerNS: p.podNS, MTU: 1400}
	if _, err := p.host.CreateVeth(other); !errors.Is(err, unix.EEXIST) {
		t.Errorf("name taken in the host: error %v, want EEXIST", err)
	}
	other.Name, other.PeerName = "eccni1", "eth0"
	if _, err := p.host.CreateVeth(other); !errors.Is(err, unix.EEXIST) {
		t.Errorf("name taken in the pod: error %v, want EEXIST", err)
	}
	links, err := p.host.Links()
	must(t, err)
	if len(links) != 2 { // lo and eccni0
		t.Errorf("a refused pair left a link behind: %+v", links)
	}
}

func TestDeleteLinkTwice(t *testing.T) {
	p := newPair(t)
	must(t, p.host.DeleteLink(p.link.Index))
	must(t, p.host.DeleteLink(p.link.Index))
	if _, err := p.host.LinkByName("eccni0"); !errors.Is(err, ErrNotFound) {
		t.Errorf("by name: %v, want ErrNotFound", err)
	}
	if _, err := p.host.LinkByIndex(p.link.Index); !errors.Is(err, ErrNotFound) {
		t.Errorf("by index: %v, want ErrNotFound", err)
	}
	if _, err := p.pod.LinkByName("eth0"); !errors.Is(err, ErrNotFound) {
		t.Errorf("peer: %v, want ErrNotFound", err)
	}
}

func TestAddresses(t *testing.T) {
	p := newPair(t)
	want := []netip.Prefix{netip.MustParsePrefix("10.9.0.7/32"), netip.MustParsePrefix("fd00::7/128")}
	for _, a := range want {
		must(t, p.pod.AddAddress(p.peer.Index, a))
		must(t, p.pod.AddAddress(p.peer.Index, a)) // again: success
	}
	list, err := p.pod.Addresses()
	must(t, err)
	var got []netip.Prefix
	for _, a := range list {
		if a.Index == p.peer.Index && !a.Link {
			got = append(got, a.Prefix)
		}
	}
	if diff := cmp.Diff(want, got, cmp.Comparer(func(a, b netip.Prefix) bool { return a == b })); diff != "" {
		t.Errorf("addresses (-want +got):\n%s", diff)
	}
}

func TestIPv6AddressIsUsableAtOnce(t *testing.T) {
	p := newPair(t)
	must(t, p.pod.AddAddress(p.peer.Index, netip.MustParsePrefix("fd00::7/128")))
	must(t, p.podNS.Do(func() error {
		c, err := net.ListenPacket("udp6", "[fd00::7]:0") // a tentative address can't be bound
		if err == nil {
			c.Close()
		}
		return err
	}))
}

func TestSetMAC(t *testing.T) {
	p := newPair(t)
	must(t, p.host.SetMAC(p.link.Index, macB))
	l, err := p.host.LinkByIndex(p.link.Index)
	must(t, err)
	if l.MAC.String() != macB.String() {
		t.Errorf("the link's address is %s, want %s", l.MAC, macB)
	}
}

func TestPeerIsSeenFromOutside(t *testing.T) {
	p := newPair(t)
	other := net.HardwareAddr{2, 0xec, 0, 0, 0, 9}
	must(t, p.pod.SetMAC(p.peer.Index, other))
	links, err := p.host.Links()
	must(t, err)
	var listed Link
	for _, l := range links {
		if l.Index == p.link.Index {
			listed = l
		} else if _, err := p.host.Peer(l); !errors.Is(err, ErrNotFound) {
			t.Errorf("peer of %s: %v, want ErrNotFound", l.Name, err)
		}
	}
	found, err := p.host.LinkByName("eccni0")
	must(t, err)
	if listed.PeerNS < 0 || listed.PeerNS != found.PeerNS {
		t.Errorf("the peer's namespace is %d as listed, %d as found", listed.PeerNS, found.PeerNS)
	}
	want, err := p.pod.LinkByName("eth0")
	must(t, err)
	peer, err := p.host.Peer(listed)
	must(t, err)
	if !bytes.Equal(peer.MAC, other) || peer.Name != "eth0" || peer.Index != want.Index || !peer.Up() {
		t.Errorf("peer %+v, want %+v", peer, want)
	}
	for what, wrong := range map[string]Link{
		"another index":             {Index: listed.Index + 1, PeerIndex: listed.PeerIndex, PeerNS: listed.PeerNS, Kind: "veth"},
		"another peer":              {Index: listed.Index, PeerIndex: 1, PeerNS: listed.PeerNS, Kind: "veth"},
		"no such peer":              {Index: listed.Index, PeerIndex: 9999, PeerNS: listed.PeerNS, Kind: "veth"},
		"a namespace without an id": {Index: listed.Index, PeerIndex: listed.PeerIndex, PeerNS: 999, Kind: "veth"},
	} {
		if l, err := p.host.Peer(wrong); !errors.Is(err, ErrNotFound) {
			t.Errorf("%s: %+v, %v, want ErrNotFound", what, l, err)
		}
	}
	must(t, p.host.DeleteLink(p.link.Index))
	if _, err := p.host.Peer(listed); !errors.Is(err, ErrNotFound) {
		t.Errorf("peer of a deleted link: %v, want ErrNotFound", err)
	}
}
