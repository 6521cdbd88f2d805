package agent

import (
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/ebpf-cni/ebpf-cni/maps/services"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/health"
	"github.com/ebpf-cni/ebpf-cni/pkg/netfilter"
	"github.com/ebpf-cni/ebpf-cni/pkg/service"
)

// portRetry is when another attempt is made at a port that somebody else has.
const portRetry = 5 * time.Second

// healthChecks answers load balancers that ask whether this node has endpoints of theirs: on the healthCheckNodePort of each Service that
// has one. The goroutine of the controller of Services owns it; those that answer read counts.
type healthChecks struct {
	*node
	// addresses are those of the node on which NodePorts answer, the unspecified one for all; none: not known yet, or all is left to kube-proxy.
	addresses []netip.Addr
	// hostPorts are the host ports of pods by the NodePort that they meet, in words.
	hostPorts map[services.Key]string
	checks    map[service.Name]*healthCheck
	// generation is another number after each change of who has which port.
	generation int
	again      time.Time // when a port that could not be opened is tried again; zero: all are open

	open    connections // of all of them together
	serving sync.WaitGroup
}

// healthCheck is what answers for one Service.
type healthCheck struct {
	port  uint16
	ready atomic.Int64
	open  map[netip.Addr]*openCheck
	err   error     // why there is none for an address of the node's
	again time.Time // when that is tried again; zero: all are open
	until time.Time // it is left to kube-proxy, if that has it
}

type openCheck struct {
	listener net.Listener
	server   *http.Server
}

func newHealthChecks(n *node) *healthChecks {
	return &healthChecks{node: n, checks: map[service.Name]*healthCheck{}}
}

// place takes the addresses of this node.
func (h *healthChecks) place(s whereabouts) {
	h.addresses = []netip.Addr{netip.IPv4Unspecified()} // to Go, of both families
	if len(h.cfg.NodePortAddresses) > 0 {
		h.addresses = slices.DeleteFunc(slices.Clone(s.held), func(a netip.Addr) bool { return isOfLink(a) || !h.cfg.narrows(a) })
	}
	if s.yields {
		h.addresses = nil
	}
	h.hostPorts = s.hostPorts
	for _, c := range h.checks {
		c.again = time.Time{}
	}
}

// follow takes in what is new of the named Services.
func (h *healthChecks) follow(m *service.Model, changed []service.Name) {
	for _, name := range changed {
		s, have := m.Service(name), h.checks[name]
		if have != nil && (s == nil || s.HealthCheckPort != have.port) {
			have.close(nil)
			delete(h.checks, name)
			h.generation++
		}
		if s == nil || s.HealthCheckPort == 0 {
			continue
		}
		if h.checks[name] == nil {
			h.checks[name] = &healthCheck{port: s.HealthCheckPort, open: map[netip.Addr]*openCheck{}}
			h.generation++
		}
		h.checks[name].ready.Store(int64(service.ReadyOn(h.cfg.Node, m.Slices(name))))
	}
}

// listen opens and closes ports. Those that could not be opened are tried again after a while, however often Services change.
func (h *healthChecks) listen() {
	now := time.Now()
	h.again = time.Time{}
	for name, c := range h.checks {
		c.close(h.addresses)
		if !now.Before(c.again) {
			h.listenFor(name, c, now)
		}
		if !c.again.IsZero() && (h.again.IsZero() || c.again.Before(h.again)) {
			h.again = c.again
		}
	}
}

// listenFor opens the port of a Service where it is not open.
func (h *healthChecks) listenFor(name service.Name, c *healthCheck, now time.Time) {
	c.err, c.again = nil, time.Time{}
	for _, at := range h.addresses {
		if c.open[at] != nil {
			continue
		}
		err := h.serve(name, c, at)
		if err != nil {
			c.again = now.Add(portRetry)
		}
		if !errors.Is(err, syscall.EADDRNOTAVAIL) { // else the address is gone, or not quite there
			c.err = errors.Join(c.err, err)
		}
	}
}

// serve answers for a Service on one address.
func (h *healthChecks) serve(name service.Name, c *healthCheck, at netip.Addr) error {
	l, err := net.Listen("tcp", net.JoinHostPort(at.String(), strconv.Itoa(int(c.port))))
	if errors.Is(err, syscall.EADDRINUSE) {
		c.until = time.Now().Add(maxRestart)
	}
	if err != nil {
		return err
	}
	if h.status.leaves(c.until) {
		return errors.Join(syscall.EADDRINUSE, l.Close()) // as it will be
	}
	ready := func() int { return int(c.ready.Load()) }
	server := httpServer(health.Service(name.Namespace, name.Name, ready, h.status.health), h.log, &h.open)
	c.open[at] = &openCheck{l, server}
	h.serving.Go(func() {
		if err := server.Serve(l); !errors.Is(err, http.ErrServerClosed) {
			h.log.Warn("health checks of a Service are not answered any more", "service", name.String(), "error", err)
		}
	})
	return nil
}

// close closes ports on all addresses but some.
func (c *healthCheck) close(but []netip.Addr) {
	for at, o := range c.open {
		if !slices.Contains(but, at) {
			_ = o.server.Close()
			_ = o.listener.Close() // which the server closes only once it has begun
			delete(c.open, at)
		}
	}
}

// end closes all ports, and waits until nobody is answered any more.
func (h *healthChecks) end() {
	for _, c := range h.checks {
		c.close(nil)
	}
	h.serving.Wait()
}

// problems are those of Services whose load balancer gets no answer here. Beside kube-proxy it has them from kube-proxy.
func (h *healthChecks) problems() (all []service.Problem) {
	problem := func(name service.Name, port uint16, why any) {
		text := fmt.Sprintf("node %s can't answer its load balancer's health checks on healthCheckNodePort %d: %v", h.cfg.Node, port, why)
		all = append(all, service.Problem{Service: name, Reason: service.HealthCheck, Text: enumerate([]string{text})})
	}
	for name, c := range h.checks {
		if has := h.hostPortAt(c.port); has != "" {
			problem(name, c.port, "it is "+has+", which was there first")
			continue
		}
		if c.err == nil || errors.Is(c.err, syscall.EADDRINUSE) && h.status.read().netfilter == netfilter.Translates {
			continue
		}
		problem(name, c.port, c.err)
	}
	return all
}

// hostPortAt names the host port of a pod that takes a TCP port of this node; empty: there is none.
func (h *healthChecks) hostPortAt(port uint16) string {
	for _, family := range []wire.Family{wire.IPv4, wire.IPv6} {
		if has := h.hostPorts[services.NodePort(family, wire.PortFrom(port), wire.TCP)]; has != "" {
			return has
		}
	}
	return ""
}
