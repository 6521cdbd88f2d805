package shortconn_test

import (
	"net/netip"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/test/lab"
	"github.com/ebpf-cni/ebpf-cni/test/lab/shortconn"
)

// Between two hosts without a network in between, nothing fails; towards a port where nobody listens, everything does.
func TestRun(t *testing.T) {
	t.Parallel()
	l := lab.ForTest(t, lab.Options{Nodes: 2, Families: []wire.Family{wire.IPv4, wire.IPv6}})
	for _, family := range l.Options.Families {
		for i, way := range shortconn.Ways() {
			t.Run(family.String()+" "+string(way), func(t *testing.T) {
				at := netip.AddrPortFrom(l.Outside.AddrOf(family), uint16(7000+i))
				o := shortconn.Options{
					Clients: []*lab.Namespace{l.Nodes[0].Namespace, l.Nodes[1].Namespace}, Server: l.Outside, At: at, Way: way, For: time.Minute, Count: 500,
				}
				r, err := shortconn.Run(t.Context(), o)
				if err != nil || r.Completed != o.Count || r.Opened != o.Count || r.Failed > 0 || r.Rate() <= 0 {
					t.Errorf("%s, %v; want 500 and no failure", r, err)
				}
				o.To, o.Count = netip.AddrPortFrom(at.Addr(), 6999), 100
				r, err = shortconn.Run(t.Context(), o)
				refused := r.Failures[unix.ECONNREFUSED.Error()]
				// The kernel sends few ICMP errors a second.
				if err != nil || r.Completed > 0 || r.Failed != o.Count || refused == 0 || refused < o.Count && way != shortconn.Question {
					t.Errorf("%s, %v; want 100 refused", r, err)
				}
			})
		}
	}
}

// A packet that is lost shows as a failure, and ends a run that asks for that.
func TestRunSeesLoss(t *testing.T) {
	t.Parallel()
	l := lab.ForTest(t, lab.Options{Nodes: 1})
	nowhere := netip.MustParseAddrPort("172.18.0.250:7000")
	r, err := shortconn.Run(t.Context(), shortconn.Options{
		Clients: []*lab.Namespace{l.Nodes[0].Namespace}, Server: l.Outside, At: netip.AddrPortFrom(l.Outside.Addr(), 7000), To: nowhere,
		Way: shortconn.ResetByClient, For: time.Minute, Failures: 1,
	})
	if err != nil || r.Completed > 0 || r.Failed == 0 || r.Failed != r.Opened {
		t.Errorf("%s, %v; want failures only", r, err)
	}
}

func TestHold(t *testing.T) {
	t.Parallel()
	l := lab.ForTest(t, lab.Options{Nodes: 1})
	at := netip.AddrPortFrom(l.Outside.Addr(), 7000)
	h, err := shortconn.Hold(l.Outside, at)
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	if opened, err := h.Open(l.Nodes[0].Namespace, at, 1100); opened != 1100 || err != nil {
		t.Errorf("%d opened, %v; want 1100", opened, err)
	}
	if err := h.Check(); err != nil {
		t.Error(err)
	}
	if opened, err := h.Open(l.Nodes[0].Namespace, netip.AddrPortFrom(at.Addr(), 6999), 500); opened != 0 || err != nil {
		t.Errorf("%d opened, %v; want none where nobody listens", opened, err)
	}
}
