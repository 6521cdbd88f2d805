package datapath

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"

	"github.com/ebpf-cni/ebpf-cni/maps/config"
	"github.com/ebpf-cni/ebpf-cni/maps/destinations"
	"github.com/ebpf-cni/ebpf-cni/maps/devices"
	"github.com/ebpf-cni/ebpf-cni/maps/endpoints"
	"github.com/ebpf-cni/ebpf-cni/maps/snat"
	"github.com/ebpf-cni/ebpf-cni/maps/uplinks"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/attach"
	"github.com/ebpf-cni/ebpf-cni/test/priv"
)

// The smallest network that masquerades: a pod, its node, and the world.
const (
	livePod   = "10.244.1.2"
	liveNode  = "198.51.100.9"
	liveWorld = "198.51.100.1"
)

// live is that network around the test's own namespace, which is the node's.
type live struct {
	node, pod, world netns.NsHandle
	podVeth, uplink  int
}

func newLive(t *testing.T) *live {
	t.Helper()
	l := &live{}
	var err error
	l.node, err = netns.Get()
	check(t, err)
	for _, h := range []*netns.NsHandle{&l.pod, &l.world} {
		*h, err = netns.New()
		check(t, err)
		check(t, netns.Set(l.node))
		t.Cleanup(func() { _ = h.Close() })
	}
	t.Cleanup(func() { _ = l.node.Close() })
	check(t, os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0))
	l.podVeth, l.uplink = addVeth(t, "pod"), addVeth(t, "up")
	up(t, "pod", "")
	up(t, "up", liveNode+"/24")
	check(t, netlink.RouteAdd(&netlink.Route{LinkIndex: l.podVeth, Scope: netlink.SCOPE_LINK, Dst: netlink.NewIPNet(net.ParseIP(livePod))}))
	l.move(t, "podp", l.pod, livePod+"/32")
	l.move(t, "upp", l.world, liveWorld+"/24")
	l.in(t, l.pod, func() {
		i := index(t, "podp")
		gateway := net.ParseIP("169.254.1.1")
		check(t, netlink.RouteAdd(&netlink.Route{LinkIndex: i, Scope: netlink.SCOPE_LINK, Dst: netlink.NewIPNet(gateway)}))
		check(t, netlink.RouteAdd(&netlink.Route{LinkIndex: i, Gw: gateway}))
	})
	return l
}

// in runs fn in a namespace, on a thread that is thrown away.
func (l *live) in(t testing.TB, ns netns.NsHandle, fn func()) {
	t.Helper()
	done := make(chan error)
	go func() {
		runtime.LockOSThread()
		err := netns.Set(ns)
		if err == nil {
			fn()
		}
		done <- err
	}()
	check(t, <-done)
}

func (l *live) move(t *testing.T, name string, to netns.NsHandle, address string) {
	t.Helper()
	one, err := netlink.LinkByName(name)
	check(t, err)
	check(t, netlink.LinkSetNsFd(one, int(to)))
	l.in(t, to, func() { up(t, name, address) })
}

func up(t *testing.T, name, address string) {
	t.Helper()
	one, err := netlink.LinkByName(name)
	check(t, err)
	if address != "" {
		a, err := netlink.ParseAddr(address)
		check(t, err)
		check(t, netlink.AddrAdd(one, a))
	}
	check(t, netlink.LinkSetUp(one))
}

func index(t *testing.T, name string) int {
	t.Helper()
	i, err := net.InterfaceByName(name)
	check(t, err)
	return i.Index
}

// start loads the programs, tells them about the network and returns them.
func (l *live) start(t *testing.T, opts Options) *Datapath {
	t.Helper()
	dp := mustLoad(t, opts)
	var podMAC, hostMAC wire.MAC
	l.in(t, l.pod, func() {
		i, err := net.InterfaceByName("podp")
		check(t, err)
		copy(podMAC[:], i.HardwareAddr)
	})
	check(t, netlink.NeighAdd(&netlink.Neigh{
		LinkIndex: l.podVeth, State: netlink.NUD_PERMANENT, IP: net.ParseIP(livePod), HardwareAddr: podMAC[:],
	}))
	host, err := net.InterfaceByName("pod")
	check(t, err)
	copy(hostMAC[:], host.HardwareAddr)
	check(t, dp.Maps.Config.Put(config.Key{}, config.Value{
		Layout: wire.LayoutVersion, NodeAddresses: wire.Addresses{addr(liveNode)}, PodCIDRAddresses: wire.Addresses{addr("10.244.1.0")}, PodCIDRLens: [wire.Families]uint32{24},
	}))
	self := destinations.KeyFrom(netip.MustParsePrefix(liveNode + "/32"))
	check(t, dp.Maps.Destinations.Put(self, destinations.Value{Kind: destinations.Host}))
	check(t, dp.Maps.Uplinks.Put(uplinks.Key{Ifindex: uint32(l.uplink)}, uplinks.Value{Addresses: wire.Addresses{addr(liveNode)}}))
	check(t, dp.AttachUplink(l.uplink, attach.UplinkHooks()))
	check(t, dp.Attach(l.podVeth, attach.FromPod))
	check(t, dp.Maps.Devices.Put(devices.Key{Ifindex: uint32(l.podVeth)}, devices.Value{Addresses: wire.Addresses{addr(livePod)}, PodMAC: podMAC, HostMAC: hostMAC}))
	check(t, dp.Maps.Endpoints.Put(endpoints.Key{Address: addr(livePod)}, endpoints.Value{Ifindex: uint32(l.podVeth), PodMAC: podMAC, HostMAC: hostMAC}))
	return dp
}

// serve answers in the world: TCP with what it got, UDP with who asked.
func (l *live) serve(t *testing.T) (tcp, udp string) {
	t.Helper()
	l.in(t, l.world, func() {
		server, err := net.Listen("tcp4", liveWorld+":0")
		check(t, err)
		t.Cleanup(func() { _ = server.Close() })
		go func() {
			for {
				c, err := server.Accept()
				if err != nil {
					return
				}
				go func() { _, _ = io.Copy(c, c); _ = c.Close() }()
			}
		}()
		asked, err := net.ListenPacket("udp4", liveWorld+":0")
		check(t, err)
		t.Cleanup(func() { _ = asked.Close() })
		go func() {
			buf := make([]byte, 64)
			for {
				_, from, err := asked.ReadFrom(buf)
				if err != nil {
					return
				}
				_, _ = asked.WriteTo([]byte(from.String()), from)
			}
		}()
		tcp, udp = server.Addr().String(), asked.LocalAddr().String()
	})
	return tcp, udp
}

// connection is one of the pod. ask sends one message and returns the answer.
type connection struct {
	net.Conn
	first string
}

func (f *connection) ask(wait time.Duration) (string, error) {
	if err := f.SetDeadline(time.Now().Add(wait)); err != nil {
		return "", err
	}
	if _, err := f.Write([]byte("are you there?")); err != nil {
		return "", err
	}
	buf := make([]byte, 64)
	n, err := f.Read(buf)
	return string(buf[:n]), err
}

// goOn asks until the test ends. A datagram may get lost; a connection may
// not end, and the world must see the same source as before.
func (f *connection) goOn(ctx context.Context) error {
	for ctx.Err() == nil {
		answer, err := f.ask(5 * time.Second)
		if err != nil {
			return fmt.Errorf("%s %s: %w", f.LocalAddr().Network(), f.LocalAddr(), err)
		}
		if answer != f.first {
			return fmt.Errorf("%s %s: the answer changed from %q to %q", f.LocalAddr().Network(), f.LocalAddr(), f.first, answer)
		}
		time.Sleep(10 * time.Millisecond)
	}
	return nil
}

// open opens flows in the pod; dial errors count as theirs.
func (l *live) open(t testing.TB, n int, network, to string) (out []*connection, err error) {
	l.in(t, l.pod, func() {
		for range n {
			c, e := (&net.Dialer{Timeout: 5 * time.Second}).Dial(network, to)
			if e != nil {
				err = e
				return
			}
			f := &connection{Conn: c}
			f.first, e = f.ask(3 * time.Second)
			if err = errors.Join(err, e); e != nil {
				_ = c.Close()
				continue
			}
			out = append(out, f)
		}
	})
	return out, err
}

// TestLiveFlowsOutliveAChangeOfLayout moves the flow tables between sizes while
// flows run and others are opened. Nothing that runs may end or change its port,
// every connection that is opened meanwhile gets through, and of the datagrams
// that open a flow hardly one is lost with each change.
func TestLiveFlowsOutliveAChangeOfLayout(t *testing.T) {
	for _, mode := range modes() {
		t.Run(string(mode), func(t *testing.T) {
			opts := isolated(t, mode)
			// So large that no pod meets its share of the tables.
			opts.SnatEntries, opts.ConntrackEntries = 40000, 40000
			l := newLive(t)
			l.start(t, opts)
			const changes = 4
			grow := func() {
				opts.SnatEntries, opts.ConntrackEntries = opts.SnatEntries+1000, opts.ConntrackEntries+1000
				dp := mustLoad(t, opts)
				if got := dp.Maps.Capacity(snat.Name); got != opts.SnatEntries {
					t.Errorf("capacity %d, want %d", got, opts.SnatEntries)
				}
			}
			// Who is kept from the processor in the middle of a change loses more, but not three times in a row.
			tooMany := true
			for tries := 0; tries < 3 && tooMany; tries++ {
				connections, datagrams := l.outlive(t, changes, grow)
				if connections.lost.Load() > 0 || connections.opened.Load() == 0 {
					t.Errorf("connections opened meanwhile: %s", connections)
				}
				if datagrams.opened.Load() == 0 {
					t.Error("no datagram has opened a flow meanwhile")
				}
				// Without tcx there is no bridge, and some are lost.
				tooMany = datagrams.lost.Load() > changes && kernelHasTCX(t)
			}
			if tooMany {
				t.Errorf("of the datagrams that opened a flow more than one was lost with each of %d changes", changes)
			}
		})
	}
}

// TestFlowOpenedInAChangeOfLayoutIsAnswered opens one after each attachment, when programs of both kinds run.
func TestFlowOpenedInAChangeOfLayoutIsAnswered(t *testing.T) {
	priv.NeedTCX(t) // without it there is no bridge
	for _, mode := range modes() {
		t.Run(string(mode), func(t *testing.T) {
			opts := isolated(t, mode)
			l := newLive(t)
			l.start(t, opts)
			_, udp := l.serve(t)
			opts.SnatEntries *= 2
			attached := 0
			dp, err := load(context.Background(), opts, func(s step) error {
				if s != stepAttached {
					return nil
				}
				attached++
				flows, err := l.open(t, 1, "udp4", udp)
				for _, f := range flows {
					_ = f.Close()
				}
				return err
			})
			if err != nil || attached != 3 {
				t.Fatalf("after attachment %d of 3: %+v", attached, err)
			}
			check(t, dp.Close())
		})
	}
}

// TestLiveFlowsOutliveAChangeOfMode begins and ceases to work beside netfilter's address translation, from each level to
// each other, while flows run and others are opened. Nothing is lost at all: no table moves.
func TestLiveFlowsOutliveAChangeOfMode(t *testing.T) {
	for _, mode := range modes() {
		t.Run(string(mode), func(t *testing.T) {
			opts := isolated(t, mode)
			opts.SnatEntries, opts.ConntrackEntries = 100_000, 100_000
			l := newLive(t)
			dp := l.start(t, opts)
			before := dp.Program(attach.FromPod.Program())
			levels := []uint32{config.Masquerades, config.Translates, config.Masquerades, 0, config.Translates, 0}
			connections, datagrams := l.outlive(t, len(levels), func() {
				opts.NodeConfig.NetfilterNat, levels = levels[0], levels[1:]
				check(t, dp.Reconfigure(context.Background(), opts.NodeConfig, false))
				if _, _, err := dp.Sweep(); err != nil {
					t.Errorf("sweep after the change: %v", err)
				}
				if ok, err := dp.Attached(l.podVeth, attach.FromPod); !ok || err != nil {
					t.Errorf("the new program is not attached: %v", err)
				}
			})
			if dp.Program(attach.FromPod.Program()) == before {
				t.Error("the programs are those of before")
			}
			for what, count := range map[string]*tally{"connections": connections, "datagrams": datagrams} {
				if count.lost.Load() > 0 || count.opened.Load() == 0 {
					t.Errorf("%s opened meanwhile: %s", what, count)
				}
			}
		})
	}
}

// outlive makes changes, one after the other, while flows run and others are opened. Nothing that runs may end or change
// its port.
func (l *live) outlive(t *testing.T, changes int, change func()) (connections, datagrams *tally) {
	t.Helper()
	tcp, udp := l.serve(t)
	running := append(l.mustOpen(t, "tcp4", tcp), l.mustOpen(t, "udp4", udp)...)
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	var wg sync.WaitGroup
	for _, f := range running {
		wg.Go(func() {
			if err := f.goOn(ctx); err != nil {
				t.Error(err)
			}
		})
	}
	connections, datagrams = new(tally), new(tally)
	wg.Go(func() { l.openMore(ctx, t, "tcp4", tcp, connections) })
	// Flows of datagrams are not known to end: to one server alone they would meet a pod's share of ports.
	for range 4 {
		_, more := l.serve(t)
		wg.Go(func() { l.openMore(ctx, t, "udp4", more, datagrams) })
	}
	for range changes {
		change()
	}
	stop()
	wg.Wait()
	for _, f := range running {
		_ = f.Close()
	}
	t.Logf("%d flows went on; opened meanwhile: connections %s, datagrams %s", len(running), connections, datagrams)
	return connections, datagrams
}

// tally counts flows that were opened, and those that got no answer.
type tally struct{ opened, lost atomic.Int32 }

func (t *tally) String() string {
	return fmt.Sprintf("%d, without an answer %d", t.opened.Load(), t.lost.Load())
}

// mustOpen opens flows that are to go on.
func (l *live) mustOpen(t *testing.T, network, to string) []*connection {
	t.Helper()
	all, err := l.open(t, 100, network, to)
	check(t, err)
	return all
}

// openMore opens one flow after the other.
func (l *live) openMore(ctx context.Context, t *testing.T, network, to string, count *tally) {
	for ctx.Err() == nil {
		some, err := l.open(t, 1, network, to)
		count.opened.Add(1)
		if err != nil {
			count.lost.Add(1)
			t.Logf("opened meanwhile: %v", err)
		}
		for _, f := range some {
			_ = f.Close()
		}
		time.Sleep(time.Millisecond)
	}
}
