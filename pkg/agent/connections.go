package agent

import (
	"net"
	"net/http"
	"net/netip"
	"slices"
	"sync"
)

// maxConnections are kept open to one listener, or to all for health checks. Scrapes and probes are a few, but a connection lives only until so many others
// have come: long enough for its answer, also in a flood of thousands a second. Each costs some 20 KiB.
const maxConnections = 512

// connections are those that are open to one listener, or to several together. When there is one too many, whoever has the most loses the oldest
// of them. So a flood costs no more memory than that, and keeps nobody else from being answered; not even who comes
// from the flood's own address, as a probe from the node itself does, which needs its connection for a moment only.
type connections struct {
	mu   sync.Mutex
	open []connection // the oldest first
}

type connection struct {
	net.Conn
	from netip.Addr
}

// follow is an http.Server's ConnState.
func (c *connections) follow(conn net.Conn, state http.ConnState) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch state {
	case http.StateNew:
		from, _ := address(conn.RemoteAddr())
		c.open = append(c.open, connection{conn, from})
		if len(c.open) > maxConnections {
			i := c.surplus()
			_ = c.open[i].Close()
			c.open = slices.Delete(c.open, i, i+1)
		}
	case http.StateClosed:
		c.open = slices.DeleteFunc(c.open, func(o connection) bool { return o.Conn == conn })
	}
}

// surplus is the oldest connection of those who have the most.
func (c *connections) surplus() int {
	count, most := map[netip.Addr]int{}, 0
	for _, o := range c.open {
		count[o.from]++
		most = max(most, count[o.from])
	}
	return slices.IndexFunc(c.open, func(o connection) bool { return count[o.from] == most })
}
