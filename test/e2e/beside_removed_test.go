package e2e

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/maps/drops"
	"github.com/ebpf-cni/ebpf-cni/pkg/attach"
	"github.com/ebpf-cni/ebpf-cni/test/lab"
)

// maim makes the visits those of a node from which programs are removed, with a connection of each that is there already.
func (p *proxied) maim(t *testing.T, node *lab.Node, pod *lab.Pod, flag string) *maimed {
	t.Helper()
	m := newMaimed(p.Lab, node, pod, flag)
	for _, v := range p.visits() {
		old, err := v.from.DialTCP(t.Context(), v.to, 0)
		if err != nil {
			t.Fatalf("%s: %v", v.name, err)
		}
		t.Cleanup(func() { old.Close() })
		v.old = old
		m.ways = append(m.ways, v.way)
	}
	for _, name := range []string{"near", "far"} {
		m.ways = append(m.ways, p.samePort(t, name), p.refused("closed"+name))
	}
	return m
}

// samePort is the way from one port to a Service and then to its endpoint.
func (p *proxied) samePort(t *testing.T, name string) way {
	t.Helper()
	old, err := p.openSamePort(t.Context(), name, p.newPort())
	if err != nil {
		t.Fatalf("the same port to Service %s and its endpoint: %v", name, err)
	}
	t.Cleanup(func() { closeAll(old) })
	return way{name: "one port to a Service and its endpoint, " + name, old: old[1], anew: func(ctx context.Context) error {
		streams, err := p.openSamePort(ctx, name, p.newPort())
		for _, stream := range streams {
			err = errors.Join(err, stream.Echo(ctx, 100))
		}
		closeAll(streams)
		return err
	}}
}

// refused is the way to a Service whose endpoint answers by an ICMP error, which has to be translated back.
func (p *proxied) refused(name string) way {
	return way{name: "ICMP error of a Service, " + name, anew: func(ctx context.Context) error {
		for {
			once, cancel := context.WithTimeout(ctx, 2*standstill)
			_, err := p.client.UDP(once, p.at(name), 64)
			cancel()
			if errors.Is(err, unix.ECONNREFUSED) {
				return nil
			}
			if ctx.Err() != nil || !errors.Is(err, os.ErrDeadlineExceeded) {
				return fmt.Errorf("%s: error %v, want that the port is closed", name, err)
			}
		}
	}}
}

// Each program removed alone, with no agent to repair it, beside netfilter and rules that drop what it calls INVALID: who is
// then cut off, and that nobody loses a connection for good. Netfilter drops the answer to a packet that it did not see.
func TestServicesWithAProgramRemoved(t *testing.T) {
	t.Parallel()
	forEachAttach(t, func(t *testing.T, flag string) {
		p := startProxied(t, lab.Options{AgentFlags: []string{flag}}, drops.NoMapping)
		proxy(t, p.Lab, "iptables-nft", p.services)
		p.waitBeside(t, true)
		p.assertVisits(t) // neighbours are known then
		for _, node := range p.Nodes {
			if err := node.KillAgent(); err != nil {
				t.Fatal(err)
			}
		}
		near, far := p.Nodes[0], p.Nodes[1]
		for _, c := range []struct {
			name string
			node *lab.Node
			pod  *lab.Pod
			hook attach.Hook
			cut  []string
		}{
			{"from_pod of the client", near, p.client, attach.FromPod, nil},
			{"from_pod of the backend", near, p.backend, attach.FromPod, []string{"new, pod to pod, same node"}},
			{"from_pod of the remote backend", far, p.remote, attach.FromPod, []string{
				"new, pod to its Service, other node", "new, pod to pod, other node",
				"new, one port to a Service and its endpoint, far", "new, ICMP error of a Service, closedfar",
			}},
			{"from_uplink of the client's node", near, nil, attach.FromUplink, []string{
				"old, pod to a Service outside", "new, pod to a Service outside", "new, pod to pod, other node",
				"old, pod to the world", "new, pod to the world",
			}},
			{"from_uplink of the other node", far, nil, attach.FromUplink, nil},
			// Nobody masquerades then what the stack sends out for a pod.
			{"to_uplink", near, nil, attach.ToUplink, []string{
				"old, pod to a Service outside", "new, pod to a Service outside", "old, pod to the world", "new, pod to the world",
			}},
		} {
			t.Run(c.name, func(t *testing.T) {
				m := p.maim(t, c.node, c.pod, flag)
				m.withoutProgram(t, c.hook, c.cut, func() { p.assertDatagrams(t, c.cut) })
			})
		}
	})
}

// assertDatagrams exchanges a datagram on every way that is not cut.
func (p *proxied) assertDatagrams(t *testing.T, cut []string) {
	t.Helper()
	for _, v := range p.visits() {
		isCut := false
		for _, name := range cut {
			isCut = isCut || strings.HasSuffix(name, ", "+v.name)
		}
		if isCut {
			continue
		}
		seen, err := v.from.UDP(within(t, answerLimit), v.to, 64)
		assertSeen(t, "UDP, "+v.name, seen, err, v.seen)
	}
}
