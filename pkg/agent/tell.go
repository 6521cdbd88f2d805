package agent

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"reflect"

	"github.com/ebpf-cni/ebpf-cni/maps/config"
	"github.com/ebpf-cni/ebpf-cni/pkg/observe"
)

// tell leaves for ebpfctl what the maps do not say: whether the node is ready,
// what translates beside us, the names of the nodes, and what is wrong with their objects. Until there is a
// list of Nodes, what an earlier agent told of them stays, as the maps do.
func (r *reconciler) tell(notReady string) error {
	c := observe.Cluster{
		NotReady: notReady, Netfilter: r.translation.describe(), Routes: r.stack[0], IPsec: r.stack[1],
		Nodes: r.published.Nodes, Problems: r.published.Problems,
	}
	if r.translation.failure != nil {
		c.Mode = r.translation.failure.Error()
	}
	if r.known && r.view != nil {
		c.Nodes, c.Problems = nil, nil
		for _, p := range r.result.Peers {
			c.Nodes = append(c.Nodes, observe.ClusterNode{Name: p.Name, Address: p.Address})
		}
		for _, p := range r.result.Problems {
			c.Problems = append(c.Problems, observe.ClusterProblem{Node: p.Node, Reason: string(p.Reason), Text: p.Text})
		}
	}
	path := filepath.Join(r.cfg.State, observe.ClusterFile)
	if _, err := os.Stat(path); err == nil && reflect.DeepEqual(c, r.published) {
		return nil
	}
	if err := writeCluster(path, c); err != nil {
		return err
	}
	r.published = c
	return nil
}

// tellStack says in the log, once, on what the host's stack decides although the programs could.
func (r *reconciler) tellStack() {
	var now [2]string
	if why := r.view.stackRoutes(); why != "" {
		now[0] = "the stack decides: " + why
	}
	if r.result.Config.Flags&config.Policies != 0 {
		now[1] = "the stack decides on what policies reach" // not how many: they come and go with every tunnel
	}
	for i, about := range []string{"routes", "IPsec"} {
		switch now[i] {
		case r.stack[i]:
		case "":
			r.log.Info("packets take the short way again", "about", about)
		default:
			r.log.Info("packets take the way through the host's stack", "about", about, "reason", now[i])
		}
	}
	r.stack = now
}

// mostRepairs is how many endpoints that lacked the same are named in the log. More
// have it from one cause, such as a new version that wants another setting.
const mostRepairs = 5

// tellRepairs says what the pass has put right.
func (r *reconciler) tellRepairs() {
	for what, names := range r.repaired {
		level := slog.LevelWarn
		if len(names) > mostRepairs {
			level = slog.LevelDebug
			r.log.Warn("endpoints repaired", "count", len(names), "missing", what)
		}
		for _, name := range names {
			r.log.Log(context.Background(), level, "endpoint repaired", "endpoint", name, "missing", what)
		}
	}
	r.repaired = nil
}

// tellStarting says that the agent is at work, but not yet what it finds. It
// returns what is told now.
func tellStarting(stateDir string) (c observe.Cluster, err error) {
	path := filepath.Join(stateDir, observe.ClusterFile)
	content, err := os.ReadFile(path) //nolint:gosec // the path is the administrator's
	if err != nil || json.Unmarshal(content, &c) != nil {
		c = observe.Cluster{} // none yet, or none that can be used: it will be written anew
	}
	c.NotReady = starting
	return c, writeCluster(path, c)
}

func writeCluster(path string, c observe.Cluster) error {
	content, err := json.Marshal(c)
	if err != nil {
		return fmt.Errorf("encode what ebpfctl is published: %w", err)
	}
	next := path + ".next"
	if err := os.WriteFile(next, append(content, '\n'), 0o600); err != nil {
		return fmt.Errorf("write what ebpfctl is published: %w", err)
	}
	if err := os.Rename(next, path); err != nil {
		return fmt.Errorf("write what ebpfctl is published: %w", err)
	}
	return nil
}
