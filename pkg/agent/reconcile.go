package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/ebpf-cni/ebpf-cni/maps/destinations"
	"github.com/ebpf-cni/ebpf-cni/pkg/bpffs"
	"github.com/ebpf-cni/ebpf-cni/pkg/datapath"
	"github.com/ebpf-cni/ebpf-cni/pkg/device"
	"github.com/ebpf-cni/ebpf-cni/pkg/endpoint"
	"github.com/ebpf-cni/ebpf-cni/pkg/install"
	"github.com/ebpf-cni/ebpf-cni/pkg/observe"
	"github.com/ebpf-cni/ebpf-cni/pkg/plan"
	"github.com/ebpf-cni/ebpf-cni/pkg/source"
)

const (
	// resync is how often everything is looked at without a reason.
	resync = 15 * time.Second
	// inspect is how often what can vanish without a notice is looked for: pins,
	// attachments, files, sysctls.
	inspect = 400 * time.Millisecond
	// passDelay is how long after a change the next pass begins, minPassInterval the least time between the
	// beginnings of two: changes come in crowds.
	passDelay       = 20 * time.Millisecond
	minPassInterval = 250 * time.Millisecond
	// firstListTimeout is how long the first pass waits for the Nodes, which most often are about to arrive.
	firstListTimeout = 300 * time.Millisecond
	// maxLogged is how many problems are logged at once: without an uplink there is one with every Node.
	maxLogged = 20
	// retry is when a pass that failed is repeated.
	retry = time.Second
)

// reconciler brings the node to what the Nodes say. All its fields that change
// belong to the goroutine of run, which waits for no lock.
type reconciler struct {
	cfg     Config
	log     *slog.Logger
	host    *device.Handle
	dp      *datapath.Datapath
	sysctls sysctls
	status  *status

	translation translation
	modes       modes

	nodes     []plan.Node
	known     bool // a complete list has arrived
	changed   time.Time
	sourceErr error

	view     *view
	result   plan.Result
	standing plan.Standing
	// applied is what the destinations map holds, routes what the kernel does, as
	// far as we wrote it.
	applied map[destinations.Key]destinations.Value
	routes  map[netip.Prefix]plan.Route

	failure  error             // of the newest pass; nil: none
	attached map[uint32]string // uplinks with our programs, by index
	absences *absences
	numbers  numbers // nil until the first look
	orphans  orphans
	// contested are the endpoints whose address somebody else had at the last pass.
	contested map[endpoint.ID]error
	repaired  map[string][]string // endpoints of this pass, by what they lacked
	reported  map[string]bool     // what was logged and need not be again
	list      stamp
	portmap   struct { // of the newest look
		stamp stamp
		found *install.Chained
	}
	plugin    [2]stamp // of what is installed, and of what it was installed from
	published observe.Cluster
	stack     [2]string              // what the stack decides on, and why, as the log was told
	disputed  map[netip.Prefix]error // routes that can't be written, but for nodes' own fault
}

// run reconciles until ctx ends: after every change of the Nodes and of the
// network, and periodically.
func (r *reconciler) run(ctx context.Context, updates <-chan source.Update, network <-chan struct{}) error {
	var (
		last    time.Time
		due     = time.Now().Add(firstListTimeout)
		full    = time.NewTimer(firstListTimeout)
		inspect = time.NewTicker(inspect)
	)
	defer full.Stop()
	defer inspect.Stop()
	// within brings the next pass forward and never puts it off: events may come
	// faster than the network is ever quiet.
	within := func(d time.Duration) {
		if at := time.Now().Add(d); at.Before(due) {
			due = at
			full.Reset(d)
		}
	}
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case u := <-updates:
			if !r.take(u) {
				r.judgeReady()
				continue
			}
			if r.view != nil && r.replan(ctx) == nil {
				continue
			}
			within(0)
		case <-network:
			within(max(passDelay, minPassInterval-time.Since(last)))
		case <-inspect.C:
			r.status.beat(time.Now())
			r.followTranslation(time.Now())
			if r.view != nil && r.inspect(ctx) {
				within(0)
			}
		case o := <-r.modes.outcome:
			r.modeChanged(ctx, o, time.Now())
			r.judgeReady()
		case <-full.C:
			again := r.pass(ctx)
			last = time.Now()
			due = last.Add(again)
			full.Reset(again)
		}
	}
}

// take accepts the newest of what the source says. It reports whether there are
// new Nodes.
func (r *reconciler) take(u source.Update) bool {
	if u.Err != nil {
		r.log.Warn("Nodes can't be read; what was known stays", "error", u.Err, "known", r.known)
		r.sourceErr = u.Err
		return false
	}
	if r.sourceErr != nil {
		r.log.Info("Nodes can be read again", "nodes", len(u.Nodes))
	} else if !r.known {
		r.log.Info("first complete list of Nodes", "nodes", len(u.Nodes))
	}
	r.sourceErr = nil
	r.nodes, r.known, r.changed = u.Nodes, true, u.Changed
	r.status.pending(u.Changed)
	return true
}

// pass looks at everything and puts it right. It returns when to do so again.
func (r *reconciler) pass(ctx context.Context) time.Duration {
	started := time.Now()
	next, err := r.passOnce()
	if err != nil && ctx.Err() == nil {
		r.complain("pass", err)
		next = retry
	} else {
		r.settled("pass")
	}
	r.failure = err
	r.judgeReady()
	r.log.Debug("pass", "took", time.Since(started), "destinations", len(r.applied), "routes", len(r.routes))
	return next
}

func (r *reconciler) passOnce() (time.Duration, error) {
	// The map first, the state files after it: the plugin writes in the other
	// order, so an entry that no file explains belongs to nobody.
	have, err := r.dp.Maps.Destinations.Content()
	if err != nil {
		return resync, err
	}
	v, err := look(r.host, r.cfg.State, r.cfg.Uplinks)
	if err != nil {
		return resync, err
	}
	if v.incomplete != nil {
		r.complain("some endpoints' state", v.incomplete)
	} else {
		r.settled("some endpoints' state")
	}
	if err := r.prepareUplinks(v); err != nil {
		return resync, err
	}
	r.view = v
	r.makePlan()
	r.tellStack()
	r.applied, r.routes = have, r.ownRoutes()
	errs := []error{r.attachUplinks(), r.apply()}
	again, err := r.tendEndpoints()
	errs = append(errs, err, r.detachUplinks(), r.sysctls.holdForwarding(v.uplinkNames()), r.installPlugin())
	return r.absences.over(v, again), errors.Join(errs...)
}

// replan applies new Nodes to the node as the last look found it, which is what
// a change of one Node in a large cluster needs to be fast.
func (r *reconciler) replan(ctx context.Context) error {
	r.makePlan()
	err := r.apply()
	if err != nil && ctx.Err() == nil {
		r.complain("pass", err)
		r.failure = err
	}
	r.judgeReady()
	return err
}

func (r *reconciler) makePlan() {
	r.result = plan.Make(plan.Input{
		Self: r.cfg.Node, Known: r.known, Nodes: r.nodes, Facts: r.view.facts(), Before: r.standing,
		Service: r.cfg.Service, Native: slices.Concat(r.cfg.NonMasquerade, r.cfg.Cluster),
	})
	r.standing = r.result.Standing
}

// apply writes the plan in the order in which packets need it: what is new
// before what is gone. What can't be written does not keep what is gone: no Node
// says it any more, and it may be what stands in the way.
func (r *reconciler) apply() error {
	errs := []error{r.writeConfig(), r.writeUplinks(), r.writeDestinations(), r.writeRoutes()}
	if r.known {
		errs = append(errs, r.deleteDestinations(), r.deleteRoutes())
	}
	err := errors.Join(errs...)
	if err == nil && r.known {
		r.status.synced(r.changed, time.Now())
	}
	r.status.describe(r.result, len(r.nodes))
	r.reportPlan()
	return err
}

// judgeReady decides whether this node can carry a pod, and says so to the
// runtime when it can, and to people.
func (r *reconciler) judgeReady() {
	why := ""
	switch {
	case !r.known && r.sourceErr != nil:
		why = "no list of Nodes: " + r.sourceErr.Error()
	case !r.known:
		why = "no complete list of Nodes yet"
	case r.view == nil:
		why = "the node has not been looked at yet"
	case !r.result.Ready:
		why = r.result.NotReady
	case r.failure != nil:
		why = r.failure.Error()
	default:
		if err := r.writeList(); err != nil {
			why = err.Error()
		}
	}
	r.status.ready(why)
	if err := r.tell(why); err != nil { // no packet and no pod depends on it
		r.complain("the file for ebpfctl", err)
	} else {
		r.settled("the file for ebpfctl")
	}
}

// reportPlan logs what is new among problems and notes, and what is over.
func (r *reconciler) reportPlan() {
	now, news := map[string]bool{}, 0
	for _, p := range r.result.Problems {
		key := "problem " + p.String()
		now[key] = true
		if r.reported[key] {
			continue
		}
		if news++; news <= maxLogged {
			r.log.Warn("problem with a Node", "node", p.Node, "reason", string(p.Reason), "detail", p.Text)
		}
	}
	if news > maxLogged {
		r.log.Warn("more problems with Nodes; the metric ebpf_cni_node_problems has them all", "more", news-maxLogged)
	}
	for _, note := range r.result.Notes {
		now["note "+note] = true
		if !r.reported["note "+note] {
			r.log.Info("about a Node", "detail", note)
		}
	}
	if standing := r.result.Standing.Own4(); r.known && standing.IsValid() && !r.inList() {
		now["absent"] = true
		if !r.reported["absent"] {
			r.log.Warn("this node is not in the list of Nodes; its pods and podCIDR stay as they are", "node", r.cfg.Node, "podCIDR", standing.String())
		}
	}
	if text := r.outsideCluster(); text != "" {
		now[text] = true
		if !r.reported[text] {
			r.log.Warn("--cluster-cidr does not hold this node's pods", "detail", text)
		}
	}
	over := 0
	for key := range r.reported {
		if now[key] || isComplaint(key) {
			continue
		}
		if over++; over <= maxLogged {
			r.log.Info("over", "what", key)
		}
		delete(r.reported, key)
	}
	maps.Copy(r.reported, now)
}

// outsideCluster says what is wrong with a cluster CIDR that is not this cluster's: most often it is another one's default.
func (r *reconciler) outsideCluster() string {
	own := r.result.Standing.Own4()
	if !own.IsValid() || len(r.cfg.Cluster) == 0 ||
		slices.ContainsFunc(r.cfg.Cluster, func(p netip.Prefix) bool { return p.Overlaps(own) && p.Bits() <= own.Bits() }) {
		return ""
	}
	return fmt.Sprintf("podCIDR %s lies outside %v, and packets to there are not masqueraded although no pod has such an address", own, r.cfg.Cluster)
}

func (r *reconciler) inList() bool {
	return slices.ContainsFunc(r.nodes, func(n plan.Node) bool { return n.Name == r.cfg.Node })
}

const complaint = "complaint "

func isComplaint(key string) bool {
	return len(key) > len(complaint) && key[:len(complaint)] == complaint
}

// complain logs an error of something that is tried again and again, once.
func (r *reconciler) complain(about string, err error) {
	key := complaint + about + ": "
	if errors.Is(err, bpffs.ErrLocked) {
		key += bpffs.ErrLocked.Error() // who holds the lock, and for how long, is another text each time
	} else {
		key += err.Error()
	}
	if !r.reported[key] {
		r.settled(about)
		r.reported[key] = true
		r.log.Error("not in order, trying again", "about", about, "error", err)
	}
}

// settled forgets what was complained of.
func (r *reconciler) settled(about string) {
	prefix := complaint + about + ": "
	maps.DeleteFunc(r.reported, func(key string, _ bool) bool {
		return strings.HasPrefix(key, prefix)
	})
}

// installPlugin puts the plugin in its place.
func (r *reconciler) installPlugin() error {
	if r.cfg.Bin == "" || r.plugin[0] != (stamp{}) && r.plugin == r.pluginStamps() {
		return nil
	}
	wrote, err := install.WritePlugin(r.cfg.Plugin, r.cfg.Bin)
	r.plugin = r.pluginStamps()
	if wrote {
		r.log.Info("plugin installed", "dir", r.cfg.Bin)
	}
	return err
}

func (r *reconciler) pluginStamps() [2]stamp {
	return [2]stamp{stampOf(filepath.Join(r.cfg.Bin, install.Plugin)), stampOf(r.cfg.Plugin)}
}
