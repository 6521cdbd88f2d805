package cluster

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	core "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	corev1 "k8s.io/client-go/kubernetes/typed/core/v1"
)

// greetPort is where the world waits for the first packets of pods.
const greetPort = 7

// Greetings are the first packets of pods, as they arrive in the world.
type Greetings struct {
	pods     corev1.PodInterface
	listener *net.UDPConn
	done     chan struct{}

	received atomic.Int64

	mu      sync.Mutex
	arrived map[string]chan time.Time
}

// Greet has the world wait for first packets, until Close.
func (c *Cluster) Greet() (*Greetings, error) {
	listener, err := c.ListenInWorld(greetPort)
	if err != nil {
		return nil, err
	}
	client, err := c.Client()
	if err != nil {
		return nil, errors.Join(err, listener.Close())
	}
	g := &Greetings{pods: client.CoreV1().Pods(metav1.NamespaceDefault), listener: listener, done: make(chan struct{}), arrived: map[string]chan time.Time{}}
	go g.receive()
	return g, nil
}

// Close ends the wait.
func (g *Greetings) Close() error {
	err := g.listener.Close()
	<-g.done
	return err
}

func (g *Greetings) receive() {
	defer close(g.done)
	buffer := make([]byte, 256)
	for {
		n, from, err := g.listener.ReadFromUDPAddrPort(buffer)
		if err != nil {
			return
		}
		now := time.Now()
		g.received.Add(1)
		// Answered, the pod is silent. One that misses the answer asks again.
		_, _ = g.listener.WriteToUDPAddrPort([]byte{0}, from)
		select {
		case g.of(string(buffer[:n])) <- now:
		default: // not its first
		}
	}
}

// Received is how many packets have come. Pods are silent once they are answered: the number stands still.
func (g *Greetings) Received() int64 { return g.received.Load() }

// of is where the time of a pod's first packet goes.
func (g *Greetings) of(name string) chan time.Time {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.arrived[name] == nil {
		g.arrived[name] = make(chan time.Time, 1)
	}
	return g.arrived[name]
}

// FirstPacket runs a pod on a node and returns how long after its creation was asked for the first packet that it sent arrived in the
// world. Until then the API server, the kubelet, containerd, the plugin and the dataplane have done their parts. The pod stays.
func (g *Greetings) FirstPacket(ctx context.Context, node *Machine, name string, labels map[string]string) (took time.Duration, err error) {
	ctx, cancel := context.WithTimeout(ctx, podLimit)
	defer cancel()
	started := time.Now()
	if _, err := g.pods.Create(ctx, greeter(name, node, g.listener.LocalAddr(), labels), metav1.CreateOptions{}); err != nil {
		return 0, fmt.Errorf("add pod %s: %w", name, err)
	}
	select {
	case at := <-g.of(name):
		return at.Sub(started), nil
	case <-ctx.Done():
		return 0, fmt.Errorf("wait for the first packet of pod %s: %w", name, context.Cause(ctx))
	}
}

// ListenInWorld opens a UDP socket of the world's.
func (c *Cluster) ListenInWorld(port uint16) (listener *net.UDPConn, err error) {
	err = c.Fabric.Do(func() error {
		listener, err = net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(c.World(), port)))
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("listen in the world: %w", err)
	}
	return listener, nil
}

func greeter(name string, node *Machine, to net.Addr, labels map[string]string) *core.Pod {
	grace := int64(1)
	return &core.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: labels},
		Spec: core.PodSpec{
			NodeName: node.Name, TerminationGracePeriodSeconds: &grace,
			Containers: []core.Container{{
				Name: "greet", Image: greetImage, ImagePullPolicy: core.PullNever,
				Args: []string{to.String(), name},
			}},
		},
	}
}
