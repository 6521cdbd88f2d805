package agent

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/ebpf-cni/ebpf-cni/maps/backends"
	"github.com/ebpf-cni/ebpf-cni/maps/endpoints"
	"github.com/ebpf-cni/ebpf-cni/maps/services"
	"github.com/ebpf-cni/ebpf-cni/maps/sockets"
	"github.com/ebpf-cni/ebpf-cni/maps/typed"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/device"
)

// socketsPause is the least time between two looks at the sockets: there may be tens of thousands, and in a large cluster
// backends cease all the time.
const socketsPause = time.Second

// attachSockets puts programs for the node's own processes back that somebody has removed.
func (l *loop) attachSockets(*state) error {
	if l.services == nil || l.cfg.Cgroup == "" {
		return nil
	}
	attached, err := l.dp.AttachSockets()
	if len(attached) > 0 {
		l.status.repaired(repairedSocket, len(attached))
		l.log.Warn("programs for sockets of the node's own processes attached again", "hooks", attached, "cgroup", l.cfg.Cgroup)
	}
	return err
}

// endSockets frees processes of the node that wait on a UDP socket for a backend that answers no more: after each change of that
// kind, and now and then, since a process may just have connected to what was about to cease.
func (c *serviceController) endSockets(ctx context.Context) error {
	for {
		c.noteSockets(c.endSocketsNow())
		if err := awaitPoke(ctx, c.ceased); err != nil {
			return err
		}
	}
}

// awaitPoke waits for a poke, or for resync, and for socketsPause in any case; its error is ctx's.
func awaitPoke(ctx context.Context, poked <-chan struct{}) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(socketsPause):
	}
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-poked:
	case <-time.After(resync - socketsPause):
	}
	return nil
}

// noteSockets notes how that went. What a kernel can't do it may learn to, by a module.
func (c *serviceController) noteSockets(err error) {
	const about = "services/sockets"
	if errors.Is(err, device.ErrNoSocketDiag) {
		c.complaints.warn(about, fmt.Errorf("processes of the node that have connected a UDP socket to a Service's backend are not told that it answers no more: %w", err))
		return
	}
	c.complaints.note(about, err)
}

// endSocketsNow ends the sockets that our programs have connected to backends that answer no more.
func (c *serviceController) endSocketsNow() error {
	stale, err := c.staleSockets()
	if len(stale) == 0 || err != nil {
		return err
	}
	all, err := device.UDPSockets()
	if err != nil {
		return err
	}
	for _, s := range all {
		// One that has another peer by now, or none, is known until it is closed or connected again.
		if v, is := stale[s.Cookie]; is && v.BackendAddress == wire.AddrFrom(s.Peer.Addr()) && v.BackendPort == wire.PortFrom(s.Peer.Port()) {
			err = errors.Join(err, s.End())
			c.log.Debug("UDP socket to a backend that answers no more ended", "cookie", s.Cookie, "backend", s.Peer)
		}
	}
	return err
}

// staleSockets are the connected UDP sockets whose backend answers no more, by their cookies. That of a host port is a pod.
func (c *serviceController) staleSockets() (map[uint64]sockets.Value, error) {
	stale := map[uint64]sockets.Value{}
	known := map[uint32]backends.Value{}
	for e, err := range c.dp.Maps.Sockets.All() {
		if err != nil {
			return nil, err
		}
		if e.Value.Proto != wire.UDP || e.Value.Connected == 0 {
			continue
		}
		ask := c.podAnswers
		if e.Value.Set != services.HostPort {
			ask = func(s sockets.Value) (bool, error) { return c.backendAnswers(s, known) }
		}
		answers, err := ask(e.Value)
		if err != nil {
			return nil, err
		}
		if !answers {
			stale[e.Key.Cookie] = e.Value
		}
	}
	return stale, nil
}

// podAnswers says whether the pod is still there to whose host port a socket is connected. Its generation is the index of its link.
func (c *serviceController) podAnswers(s sockets.Value) (bool, error) {
	pod, err := c.dp.Maps.Endpoints.Get(endpoints.Key{Address: s.BackendAddress})
	if errors.Is(err, typed.ErrKeyNotExist) {
		return false, nil
	}
	return pod.Ifindex == s.Generation, err
}

// backendAnswers says whether a Service's backend answers still to which a socket is connected; known are those that have been read.
func (c *serviceController) backendAnswers(s sockets.Value, known map[uint32]backends.Value) (bool, error) {
	b, read := known[s.Backend]
	if !read {
		var err error
		if b, err = c.dp.Maps.Backends.Get(backends.Key{Backend: s.Backend}); err != nil {
			return false, err
		}
		known[s.Backend] = b
	}
	return b.Set == s.Set && b.Generation == s.Generation && b.Flags&(backends.Serving|backends.Answers) != 0, nil
}

// poke makes a channel with room for one readable.
func poke(c chan<- struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}
