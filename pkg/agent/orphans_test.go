package agent

import (
	"net/netip"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/maps/endpoints"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/endpoint"
	"github.com/ebpf-cni/ebpf-cni/pkg/endpoint/ipam"
	"github.com/ebpf-cni/ebpf-cni/pkg/install"
)

// orphan is an endpoint without link and namespace, with an address.
func orphan(t *testing.T, l *loop) endpoint.Endpoint {
	t.Helper()
	id := endpoint.ID{ContainerID: "lost", IfName: "eth0"}
	s, err := ipam.Open(l.cfg.State, install.Network, ipam.Options{})
	if err != nil {
		t.Fatal(err)
	}
	conf, err := ipam.Parse([]byte(`{"name":"ebpf-cni","ipam":{"type":"host-local","ranges":[[{"subnet":"10.244.1.0/24"}]]}}`), "")
	if err != nil {
		t.Fatal(err)
	}
	got, err := s.Allocate(t.Context(), ipam.Owner(id), conf)
	if err != nil {
		t.Fatal(err)
	}
	e := endpoint.Endpoint{
		ID: id, Network: install.Network, NetNS: filepath.Join(t.TempDir(), "netns"), NetNSInode: 7,
		HostName: id.HostLinkName(), HostIndex: 4242, Addresses: []netip.Addr{got[0]}, IPAM: endpoint.HostLocal,
	}
	if err := endpoint.Write(l.cfg.State, e); err != nil {
		t.Fatal(err)
	}
	key := endpoints.Key{Address: wire.AddrFrom(e.Addresses[0])}
	if err := l.dp.Maps.Endpoints.Put(key, e.Entry()); err != nil {
		t.Fatal(err)
	}
	return e
}

func (l *loop) remains(t *testing.T, e endpoint.Endpoint) (file, entry, address bool) {
	t.Helper()
	_, err := endpoint.Read(l.cfg.State, e.ID)
	file = err == nil
	_, err = l.dp.Maps.Endpoints.Get(endpoints.Key{Address: wire.AddrFrom(e.Addresses[0])})
	entry = err == nil
	all, err := ipam.List(l.cfg.State)
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range all {
		address = address || a.State == ipam.Used
	}
	return file, entry, address
}

func TestLostDelIsReleasedAtTheSecondLook(t *testing.T) {
	l := testLoop(t)
	ready(t, l)
	e := orphan(t, l)
	if again := l.pass(t.Context()); again > releaseDelay {
		t.Errorf("the second look comes after %v", again)
	}
	l.pass(t.Context()) // too early to be the second observation
	if file, entry, address := l.remains(t, e); !file || !entry || !address {
		t.Fatalf("released too early: file %v, entry %v, address %v", file, entry, address)
	}
	l.endpoints.orphans.first[e.ID] = time.Now().Add(-releaseDelay)
	l.pass(t.Context())
	if file, entry, address := l.remains(t, e); file || entry || address {
		t.Errorf("not released: file %v, entry %v, address %v", file, entry, address)
	}
}

// linkless is an endpoint whose link is gone, not its namespace.
func linkless(t *testing.T, l *loop) endpoint.Endpoint {
	t.Helper()
	e := orphan(t, l)
	if err := os.WriteFile(e.NetNS, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	var st unix.Stat_t
	if err := unix.Stat(e.NetNS, &st); err != nil {
		t.Fatal(err)
	}
	e.NetNSInode = st.Ino
	if err := endpoint.Write(l.cfg.State, e); err != nil {
		t.Fatal(err)
	}
	return e
}

func TestEndpointWithANamespaceIsNotReleased(t *testing.T) {
	l := testLoop(t)
	ready(t, l)
	e := linkless(t, l)
	l.pass(t.Context())
	l.endpoints.orphans.first[e.ID] = time.Now().Add(-time.Hour)
	l.pass(t.Context())
	if file, _, address := l.remains(t, e); !file || !address {
		t.Errorf("an endpoint whose namespace is there was released: file %v, address %v", file, address)
	}
}

// A DEL that is at work is nothing to complain of, nor to remember.
func TestEndpointWithoutALinkIsToldOfAtTheSecondLook(t *testing.T) {
	l := testLoop(t)
	ready(t, l)
	e := linkless(t, l)
	told := func() bool { return l.complaints.current[aboutEndpoint(e.ID)].text != "" }
	if again := l.pass(t.Context()); again > releaseDelay {
		t.Errorf("the second look comes after %v", again)
	}
	if told() {
		t.Error("told of at the first look")
	}
	l.endpoints.orphans.linkless[e.ID] = time.Now().Add(-releaseDelay)
	l.pass(t.Context())
	if !told() {
		t.Error("not told of at the second look")
	}
	if err := endpoint.Remove(l.cfg.State, e.ID); err != nil {
		t.Fatal(err)
	}
	l.pass(t.Context())
	if told() || len(l.endpoints.orphans.linkless) > 0 {
		t.Errorf("remembered although it is gone: %v", l.complaints.current)
	}
}

func TestReservationOfNobodyIsReleased(t *testing.T) {
	l := testLoop(t)
	ready(t, l)
	e := orphan(t, l)
	if err := endpoint.Remove(l.cfg.State, e.ID); err != nil {
		t.Fatal(err)
	}
	l.pass(t.Context())
	if _, _, address := l.remains(t, e); !address {
		t.Fatal("released at the first look")
	}
	l.endpoints.orphans.first[e.ID] = time.Now().Add(-releaseDelay)
	l.pass(t.Context())
	if _, _, address := l.remains(t, e); address {
		t.Error("the address is still held")
	}
}

// The file of an endpoint whose addresses another ipam plugin gave says how they are given back, which DEL and GC do.
func TestFileOfADelegatedEndpointStays(t *testing.T) {
	l := testLoop(t)
	ready(t, l)
	e := orphan(t, l)
	e.IPAM, e.IPAMConf = "other", []byte(`{"ipam":{"type":"other"}}`)
	if err := endpoint.Write(l.cfg.State, e); err != nil {
		t.Fatal(err)
	}
	l.pass(t.Context())
	l.endpoints.orphans.first[e.ID] = time.Now().Add(-releaseDelay)
	for range 3 {
		l.pass(t.Context())
		file, entry, address := l.remains(t, e)
		if now, err := endpoint.Read(l.cfg.State, e.ID); !file || entry || address || !now.Releasing {
			t.Errorf("file %v (%v), entry %v, address %v: want the file alone, marked", file, err, entry, address)
		}
	}
	if len(l.endpoints.orphans.first) > 0 {
		t.Errorf("still searched for: %v", l.endpoints.orphans.first)
	}
}
