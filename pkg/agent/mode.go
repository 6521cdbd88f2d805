package agent

import (
	"context"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/ebpf-cni/ebpf-cni/maps/config"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/bpffs"
	"github.com/ebpf-cni/ebpf-cni/pkg/netfilter"
	"github.com/ebpf-cni/ebpf-cni/pkg/plan"
)

// retryMode is when another attempt is made at a mode that did not come about:
// each costs the verifier's work.
const retryMode = 15 * time.Second

// modeController owns the programs' mode: they work beside netfilter while that
// translates addresses on this node, and bypass it otherwise.
type modeController struct {
	*node
	watch *netfilter.Watch
	// beside says that the programs work beside netfilter's translation.
	beside bool
	// used are the families that the cluster uses: in others nobody minds what translates.
	used plan.FamilySet
	// translates says that netfilter does, as was found last: the programs may not have followed yet.
	translates bool
	// again is when to look again, after a failure.
	again time.Time
	// changing says that the programs are being replaced, by another goroutine: routes
	// and pods must not wait for the verifier, nor for the plugin's work to end. Nothing
	// more is wanted before its outcome has been taken.
	changing bool
	wanted   chan bool
	outcomes chan outcome
}

// outcome is how a change of the programs went.
type outcome struct {
	beside bool
	err    error
}

func newMode(n *node) *modeController {
	return &modeController{node: n, watch: netfilter.New(), used: plan.FamilySet{wire.IPv4: true}, wanted: make(chan bool, 1), outcomes: make(chan outcome, 1)}
}

// begin decides on the mode of the first programs.
func (c *modeController) begin(now time.Time) {
	c.used = usedBefore(c.cfg.BPFFS)
	var err error
	if c.beside, err = c.find(func() (bool, error) { return c.watch.Begin(now) }); err != nil { // follow tries again
		c.log.Warn("netfilter's rules can't be read", "error", err)
	}
	c.translates = c.beside
}

// find asks whether netfilter translates, unless --kube-proxy says.
func (c *modeController) find(ask func() (bool, error)) (beside bool, err error) {
	if c.cfg.KubeProxy != KubeProxyAuto {
		return c.cfg.KubeProxy == KubeProxyOn, nil
	}
	c.watch.Of(numbersOf(c.used))
	return ask()
}

// usedBefore are the families in which an earlier agent's pods have addresses, and that of IPv4.
func usedBefore(dir bpffs.Dir) plan.FamilySet {
	used := plan.FamilySet{wire.IPv4: true}
	m, err := config.Open(dir.Map(config.Name))
	if err != nil {
		return used // there was none
	}
	defer m.Close()
	have, err := m.Get(config.Key{})
	for f := range wire.Families {
		used[f] = used[f] || err == nil && have.PodCIDR(f).IsValid()
	}
	return used
}

// follow looks at netfilter and has the programs replaced if they need another mode.
func (c *modeController) follow(now time.Time) {
	if c.changing || now.Before(c.again) {
		return
	}
	beside, err := c.find(func() (bool, error) { return c.watch.Look(now, c.beside) })
	c.complaints.note("mode/netfilter's rules", err)
	c.translates = beside
	if beside != c.beside {
		c.changing = true
		c.wanted <- beside
	}
}

// run replaces the programs when that is wanted, until ctx ends. It is the other
// goroutine.
func (c *modeController) run(ctx context.Context) error {
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case beside := <-c.wanted:
			c.replace(ctx, beside)
		}
	}
}

func (c *modeController) replace(ctx context.Context, beside bool) {
	err := c.dp.Reconfigure(ctx, c.cfg.nodeConfig(beside))
	c.outcomes <- outcome{beside, explainMode(err, beside)}
}

// changed takes the outcome.
func (c *modeController) changed(ctx context.Context, o outcome, now time.Time) {
	c.changing = false
	err := o.err
	if err != nil {
		err = fmt.Errorf("the programs do not suit netfilter's rules on this node and could not be replaced, so Services may not work: %w", err)
	}
	if ctx.Err() == nil {
		c.complaints.note("mode/netfilter's translation", err)
	}
	if err != nil {
		c.again = now.Add(retryMode)
		return
	}
	c.beside = o.beside
	c.report()
}

// where says beside what the programs work; empty: netfilter does not translate.
func (c *modeController) where() string {
	switch {
	case !c.beside:
		return ""
	case c.cfg.KubeProxy == KubeProxyOn:
		return "--kube-proxy=on"
	}
	return c.watch.Where()
}

// report logs beside what the programs work now, and has it in the metrics.
func (c *modeController) report() {
	where := c.where()
	c.status.set(func(f *figures) { f.beside = where != "" })
	if where == "" {
		c.log.Info("nothing translates addresses on this node; packets bypass netfilter")
	} else {
		c.log.Info("working beside netfilter's translation of addresses", "found", where)
		if c.cfg.Services {
			c.log.Info("what pods send to Services is translated by the programs all the same; netfilter's rules serve the host and the world")
		}
	}
}

// explainMode says what to do when the programs don't load because the kernel
// does not let them ask netfilter's connection table.
func explainMode(err error, beside bool) error {
	if err == nil || !beside || !strings.Contains(err.Error(), "unknown kfunc") {
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
