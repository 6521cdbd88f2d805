package modes

import (
	"context"
	"fmt"
	"log/slog"
	"time"
)

// Network is a mode that stands.
type Network struct {
	// Mode is one of Names.
	Mode string
}

// Build builds a mode.
func Build(_ context.Context, mode string, _ *slog.Logger) (*Network, error) {
	return nil, fmt.Errorf("build mode %s: %w", mode, ErrNotApplicable)
}

// Ends are the two ends of a path; false for a path that the mode does not have.
func (n *Network) Ends(_ Path) (client, server End, ok bool) { return End{}, End{}, false }

// Count reads the counters.
func (n *Network) Count() (Counters, error) { return nil, ErrNotApplicable }

// Carried is an error unless at least that many packets went the path's way from client to server between two counts.
func (n *Network) Carried(_, _ Counters, _ Path, _ uint64) error { return ErrNotApplicable }

// Add has the mode's plugins add pod i on the first node, and says how long libcni took. Several may run at once.
func (n *Network) Add(_ context.Context, _ int) (time.Duration, error) { return 0, ErrNotApplicable }

// Del has the plugins take pod i away again.
func (n *Network) Del(_ context.Context, _ int) (time.Duration, error) { return 0, ErrNotApplicable }

// SetNodes makes the network know k nodes, its own two among them, and returns when it does.
func (n *Network) SetNodes(_ context.Context, _ int) error { return ErrNotApplicable }

// SetServices makes the network have k Services.
func (n *Network) SetServices(_ context.Context, _ int) error { return ErrNotApplicable }

// Programs are the network's BPF programs; none in the classical modes.
func (n *Network) Programs() ([]Program, error) { return nil, ErrNotApplicable }

// Close removes the network and everything that belongs to it.
func (n *Network) Close() error { return nil }
