package agent

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/device"
	"github.com/ebpf-cni/ebpf-cni/pkg/netfilter"
	"github.com/ebpf-cni/ebpf-cni/pkg/plan"
)

// retryMode is when another attempt is made at a mode that did not come about:
// each costs the verifier's work.
const retryMode = 15 * time.Second

// unsuitedPrograms is what is complained about while the programs can't be replaced by those of another mode.
const unsuitedPrograms = "mode/netfilter's translation"

// modeController owns the programs' mode: they work beside netfilter while that
// translates addresses on this node, and bypass it otherwise.
type modeController struct {
	*node
	watch *netfilter.Watch
	// around is what is around the rules, as told to watch; marks looks for those that mark pods' packets.
	around      netfilter.Surroundings
	marks       netfilter.Marks
	programMode // as the programs have it
	// shared are the ports that masqueraded flows should get, as far as the level allows.
	shared snatGiven
	// needsBare says that an uplink has no Ethernet header.
	needsBare bool
	// found is that as it was found last: the programs may not have followed yet.
	found netfilter.Level
	// again is when to look again, after a failure.
	again time.Time
	// changing says that the programs are being replaced, by another goroutine: routes
	// and pods must not wait for the verifier, nor for the plugin's work to end. Nothing
	// more is wanted before its outcome has been taken.
	changing bool
	wanted   chan programMode
	outcomes chan outcome
}

// programMode is what programs are loaded for that may change while the agent runs: whose packets netfilter may translate, which ports
// new masqueraded flows get, and whether there are programs for uplinks without an Ethernet header.
type programMode struct {
	level netfilter.Level
	snatGiven
	bare bool
}

// outcome is how a change of the programs went.
type outcome struct {
	programMode
	err error
}

func newMode(n *node) *modeController {
	return &modeController{node: n, watch: netfilter.New(), wanted: make(chan programMode, 1), outcomes: make(chan outcome, 1)}
}

// begin decides on the mode of the first programs.
func (c *modeController) begin(now time.Time) {
	c.among(c.surroundingsBefore())
	var err error
	if c.level, err = c.find(func() (netfilter.Level, error) { return c.watch.Begin(now) }); err != nil { // follow tries again
		c.log.Warn("netfilter's rules can't be read", "error", err)
	}
	c.found = c.level
}

// beginOn says whether the first programs are for links without an Ethernet header as well. Without a list of links they come when the
// first uplink of that kind does.
func (c *modeController) beginOn(host *device.Handle) {
	links, err := host.Links()
	c.bare = err == nil && slices.ContainsFunc(links, func(l device.Link) bool { return l.Bare && l.Up() })
}

// beginWith says which ports the first programs masquerade to.
func (c *modeController) beginWith(shared snatGiven) {
	c.snatGiven, c.shared = c.cfg.snatBeside(c.level, shared), shared
}

// find asks what netfilter translates, unless --kube-proxy says.
func (c *modeController) find(ask func() (netfilter.Level, error)) (netfilter.Level, error) {
	switch c.cfg.KubeProxy {
	case KubeProxyOn:
		return netfilter.Translates, nil
	case KubeProxyOff:
		return netfilter.Nothing, nil
	}
	return ask()
}

// share takes which ports to masquerade to, and whether an uplink has no Ethernet header.
func (c *modeController) share(s *state) error {
	if s.ports != nil {
		c.shared = s.ports.snatGiven
	}
	c.needsBare = slices.ContainsFunc(s.view.uplinks, func(l plan.Link) bool { return l.Bare })
	return nil
}

// follow looks at netfilter and has the programs replaced if they need another mode.
func (c *modeController) follow(now time.Time) {
	if c.changing || now.Before(c.again) {
		return
	}
	level, err := c.find(func() (netfilter.Level, error) { return c.watch.Look(now, c.level) })
	c.complaints.note("mode/netfilter's rules", err)
	c.found = level
	want := programMode{level, c.cfg.snatBeside(level, c.shared), c.bare || c.needsBare}
	if want == c.programMode {
		c.complaints.note(unsuitedPrograms, nil) // what they could not be replaced for is over
		return
	}
	c.changing = true
	c.wanted <- want
}

// among says what is around the rules from now on.
func (c *modeController) among(s netfilter.Surroundings) {
	c.around = s
	c.watch.Among(s)
}

// marked says which rule of netfilter's may set a mark in pods' packets that a routing rule asks for; empty: none. No other packet of
// theirs has a mark when it is routed.
func (c *modeController) marked(v *view, now time.Time) string {
	bits := v.marks()
	if bits == 0 {
		return ""
	}
	found, err := c.marks.Look(now, bits, c.around)
	c.complaints.note("mode/netfilter's marks", err)
	return found
}

// run replaces the programs when that is wanted, until ctx ends. It is the other
// goroutine.
func (c *modeController) run(ctx context.Context) error {
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case mode := <-c.wanted:
			c.replace(ctx, mode)
		}
	}
}

func (c *modeController) replace(ctx context.Context, mode programMode) {
	err := c.dp.Reconfigure(ctx, c.nodeConfig(mode), mode.bare)
	c.outcomes <- outcome{mode, explainMode(err, mode.level)}
}

// changed takes the outcome.
func (c *modeController) changed(ctx context.Context, o outcome, now time.Time) {
	c.changing = false
	err := o.err
	if err != nil {
		err = fmt.Errorf("%s: %w", c.unsuited(o.programMode), err)
	}
	if ctx.Err() == nil {
		c.complaints.note(unsuitedPrograms, err)
	}
	if err != nil {
		c.again = now.Add(retryMode)
		return
	}
	before := c.programMode
	c.programMode = o.programMode
	if c.snat != before.snat {
		c.log.Info("other ports to masquerade to", "ports", c.snat, "before", before.snat)
	}
	if c.level != before.level {
		c.report()
	}
}

// unsuited says what is wrong while the programs can't be replaced by those of another mode.
func (c *modeController) unsuited(want programMode) string {
	switch {
	case want.bare != c.bare:
		return "the programs for uplinks without an Ethernet header could not be loaded: pods' packets over them are dropped, and those that the host's stack forwards leave with pods' addresses"
	case want.level == c.level:
		return fmt.Sprintf("the programs still masquerade to ports %s, not %s, and could not be replaced, so the node's own connections may collide with pods'", c.snat, want.snat)
	}
	return "the programs do not suit netfilter's rules on this node and could not be replaced, so Services may not work"
}

// where says beside what the programs work; empty: netfilter does not translate.
func (c *modeController) where() string {
	switch {
	case c.level == netfilter.Nothing:
		return ""
	case c.cfg.KubeProxy == KubeProxyOn:
		return "--kube-proxy=on"
	}
	return c.watch.Where(c.level)
}

// masqueradesTo names the ports that new masqueraded flows get; empty: pods are not masqueraded.
func (c *modeController) masqueradesTo() string {
	if c.cfg.Masquerade == [wire.Families]bool{} {
		return ""
	}
	if c.privileged.count() == 0 {
		return c.snat.String()
	}
	return fmt.Sprintf("%s; below 1024: %s", c.snat, c.privileged)
}

// report logs beside what the programs work now, and has it in the metrics.
func (c *modeController) report() {
	c.status.set(func(f *figures) { f.netfilter = c.level })
	switch c.level {
	case netfilter.Nothing:
		c.log.Info("nothing translates addresses on this node; packets bypass netfilter")
	case netfilter.Masquerades:
		c.log.Info("netfilter translates no pod's packets, which bypass it; its table of connections is asked for the ports that others' have", "found", c.where())
	case netfilter.Translates:
		c.log.Info("working beside netfilter's translation of addresses", "found", c.where())
		if c.cfg.Services == ServicesOn {
			c.log.Info("Services are served by the programs all the same; connections that netfilter translates already stay with it")
		}
	}
}

// explainMode says what to do when the programs don't load because the kernel
// does not let them ask netfilter's connection table.
func explainMode(err error, level netfilter.Level) error {
	if err == nil || level == netfilter.Nothing || !strings.Contains(err.Error(), "unknown kfunc") {
		return err
	}
	const module = "/sys/kernel/btf/nf_conntrack"
	remedy := "the module nf_conntrack is not loaded: `modprobe nf_conntrack`"
	if _, statErr := os.Stat(module); statErr == nil {
		remedy = "nf_conntrack is a module here, whose functions the kernel gives to nobody without CAP_SYS_ADMIN: " +
			"add SYS_ADMIN to the agent's capabilities"
	}
	return fmt.Errorf("work beside netfilter's translation: %s, or set --kube-proxy=off where nothing translates: %w", remedy, err)
}
