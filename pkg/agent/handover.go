package agent

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/ebpf-cni/ebpf-cni/maps/config"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/netfilter"
)

// handover owns who serves Services with --services auto: the programs, or rules of kube-proxy's while those stand on the node. Each
// family is decided alone, since kube-proxy's rules of the two come and go one after the other. A flow stays with whoever has its first packet.
type handover struct {
	*node
	mode  *modeController
	rules *netfilter.KubeProxy
	// filled says whether the maps hold the Services.
	filled func() bool
	// looked says that rules have been looked for, relieved that they count as gone since somebody is about to remove them.
	looked, relieved bool
	// decided is who serves, logged what the log said of it last.
	decided yields
	logged  config.Flags
	begun   bool // something was logged
}

// yields are, by families, where rules stand to which the programs leave Services; empty: nowhere.
type yields [wire.Families]string

// any says whether there are some.
func (y yields) any() bool { return y != yields{} }

// yieldsFlags are those of config, by families.
var yieldsFlags = [wire.Families]config.Flags{wire.IPv4: config.YieldsIPv4, wire.IPv6: config.YieldsIPv6}

// flags are those that config has.
func (y yields) flags() (f config.Flags) {
	for family, flag := range yieldsFlags {
		if y[family] != "" {
			f |= flag
		}
	}
	return f
}

// String says who serves Services.
func (y yields) String() string {
	const programs = "served by the programs"
	var left []string
	for family, where := range y {
		if where != "" {
			left = append(left, fmt.Sprintf("%s (%s)", wire.Family(family).Name(), where))
		}
	}
	switch len(left) {
	case 0:
		return programs
	case len(y):
		return "left to kube-proxy's rules in " + strings.Join(left, " and ")
	}
	return fmt.Sprintf("left to kube-proxy's rules in %s, else %s", left[0], programs)
}

// settle is for how long rules must have been away before the ports are taken on which kube-proxy answers: at boot an agent often starts
// before it.
const settle = 30 * time.Second

func newHandover(n *node, m *modeController, filled func() bool) *handover {
	return &handover{node: n, mode: m, rules: new(netfilter.KubeProxy), filled: filled}
}

// begin goes by what an earlier agent has decided.
func (c *handover) begin() error {
	if c.cfg.Services != ServicesAuto {
		return nil
	}
	before, err := c.dp.Maps.Config.Get(config.Key{})
	if err != nil {
		return err
	}
	for family, flag := range yieldsFlags {
		if before.Flags&flag != 0 {
			c.decided[family] = "as an earlier agent has found them"
		}
	}
	c.status.set(func(f *figures) { f.yields = c.decided })
	if c.cfg.KubeProxy == KubeProxyAuto && (c.decided.any() || before.Flags&config.Services == 0) { // else this node has served until now
		c.status.set(func(f *figures) { f.served = time.Now() })
	}
	return nil
}

// follow decides, by rules of kube-proxy's. That is in force once config has its flags.
func (c *handover) follow(s *state) error {
	s.yields = c.decided
	if c.cfg.Services != ServicesAuto {
		return nil
	}
	to, err := c.find(time.Now())
	if err != nil {
		err = fmt.Errorf("look for kube-proxy's rules, which decide who serves Services: %w", err)
	}
	if c.mode.level != netfilter.Translates || c.mode.changing {
		to = yields{} // answers would pass rules by that have translated the question
	}
	c.decided, s.yields = to, to
	c.tell()
	return err
}

// tell has the log, the metrics and ebpfctl say who serves.
func (c *handover) tell() {
	if is := c.decided.flags(); !c.begun || is != c.logged {
		c.begun, c.logged = true, is
		c.log.Info("who serves Services has been decided; connections stay with whoever has served them until then", "Services", c.decided.String())
	}
	c.status.set(func(f *figures) {
		switch {
		case c.relieved: // whoever removes them has seen that no kube-proxy runs
			f.served = time.Time{}
		case f.yields.any() && !c.decided.any():
			f.served = time.Now()
		}
		f.yields = c.decided
	})
}

// find says where rules stand to which Services are to be left. After an error that is as it was known before.
func (c *handover) find(now time.Time) (yields, error) {
	switch c.cfg.KubeProxy {
	case KubeProxyOff:
		return yields{}, nil
	case KubeProxyOn:
		return yields{"--kube-proxy=on", "--kube-proxy=on"}, nil
	}
	goes, err := kubeProxyGoes(c.cfg.State)
	standing, lookErr := c.rules.Look(now)
	err = errors.Join(err, lookErr)
	c.looked = c.looked || lookErr == nil
	c.relieved = goes && c.filled()
	switch {
	case c.relieved:
		return yields{}, err
	case !c.looked:
		return c.decided, err
	}
	return yields{wire.IPv4: standing.IPv4, wire.IPv6: standing.IPv6}, err
}

// needed says whether pods have nobody else that serves Services.
func (c *serviceController) needed() bool {
	return c.cfg.servesServices() && !c.status.read().yields.any()
}

func (c *handover) close() { c.rules.Close() }
