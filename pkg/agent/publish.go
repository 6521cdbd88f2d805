package agent

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/ebpf-cni/ebpf-cni/pkg/netfilter"
	"github.com/ebpf-cni/ebpf-cni/pkg/observe"
)

// publish leaves for ebpfctl what the maps do not say: whether the node is ready,
// what translates beside us, the names of the nodes, and what is wrong with their
// objects. Until there is a list of Nodes, what an earlier agent left of them
// stays, as the maps do.
func (l *loop) publish(notReady string, degraded map[string]string) error {
	c := observe.Cluster{
		NotReady: notReady, Degraded: listed(degraded), APIServer: l.describeAPI(), Routing: l.tunnel.describe(), SNATPorts: l.mode.masqueradesTo(), Netfilter: l.mode.where(), NetfilterLevel: levelNames[l.mode.level], Routes: l.cluster.stack[0], IPsec: l.cluster.stack[1],
		Nodes: l.published.Nodes, Problems: l.published.Problems, Services: l.whoServes(), ServiceProblems: toldProblems(l.services.read().problems), NetworkProblems: l.networkProblems,
	}
	if l.known && l.sourceErr != nil {
		c.Lost = l.lost
	}
	if l.known && l.view != nil {
		c.Nodes, c.Problems = nil, nil
		for _, p := range l.plan.Peers {
			for _, a := range append([]netip.Addr{p.Address}, p.Others...) {
				c.Nodes = append(c.Nodes, observe.ClusterNode{Name: p.Name, Address: a})
			}
		}
		for _, p := range l.cluster.problems {
			c.Problems = append(c.Problems, observe.ClusterProblem{Node: p.Node, Reason: string(p.Reason), Text: p.Text})
		}
	}
	path := l.publishedPath()
	asLeft := l.isAsLeft()
	// By the file's time stamp ebpfctl sees that the loop still goes round. Setting it needs no room on a full disk.
	err := os.Chtimes(path, time.Time{}, time.Now())
	if asLeft && l.content != nil {
		l.leave(path)
	}
	if err == nil && asLeft && reflect.DeepEqual(c, l.published) {
		return nil
	}
	content, err := writeCluster(path, c)
	if err != nil {
		return err
	}
	if !asLeft {
		l.log.Warn("the file for ebpfctl was changed or removed, and is written again", "file", path)
	}
	l.published, l.content = c, content
	l.leave(path)
	return nil
}

// leave notes the file as this agent leaves it. One that others have changed since it was written counts as changed.
func (l *loop) leave(path string) {
	l.left = stampOf(path)
	if have, err := os.ReadFile(path); err != nil || !bytes.Equal(have, l.content) {
		l.left = stamp{size: -1} // which no file has
	}
}

// levelNames are what the levels are called in the file for ebpfctl.
var levelNames = map[netfilter.Level]string{netfilter.Masquerades: observe.Masquerades, netfilter.Translates: observe.Translates}

// whoServes says who serves Services; empty: others do.
func (l *loop) whoServes() string {
	if !l.cfg.servesServices() {
		return ""
	}
	who := l.yields.String()
	if l.yields.any() {
		return who + "; connections that the programs translate already go on"
	}
	if l.mode.level == netfilter.Translates {
		who += "; connections that netfilter translates already stay with it"
	}
	if at := l.services.told; at.known && len(l.cfg.NodePortAddresses) > 0 && !slices.ContainsFunc(at.held, l.cfg.narrows) {
		who += "; NodePorts answer on no address of this node: --nodeport-addresses has none of them"
	}
	if left := l.status.read().left; len(left) > 0 {
		who += "; " + strings.Join(left, " and ") + " left to kube-proxy"
	}
	if !l.status.health().Serves() {
		who += "; load balancers are told that this node serves none"
	}
	return who
}

func (l *loop) publishedPath() string { return filepath.Join(l.cfg.State, observe.ClusterFile) }

// isAsLeft reports whether nobody has touched the file for ebpfctl since this agent did.
func (l *loop) isAsLeft() bool { return l.left == (stamp{}) || stampOf(l.publishedPath()) == l.left }

// mostDegraded is how many complaints are in the file for ebpfctl.
const mostDegraded = 50

// listed are complaints as people read them, in order, and not too many. The loss of the source of Nodes is the first.
func listed(degraded map[string]string) (list []observe.Degraded) {
	place := func(about string) string { return strings.TrimPrefix(about, observe.AboutNodes) }
	for _, about := range slices.SortedFunc(maps.Keys(degraded), func(a, b string) int { return strings.Compare(place(a), place(b)) }) {
		if len(list) == mostDegraded {
			break
		}
		list = append(list, observe.Degraded{About: about, Text: enumerate(strings.Split(degraded[about], "\n"))})
	}
	return list
}

// publishStarting says that the agent is at work, but not yet what it finds. It
// returns what the file contains now.
func publishStarting(stateDir string) (c observe.Cluster, err error) {
	path := filepath.Join(stateDir, observe.ClusterFile)
	content, err := os.ReadFile(path) //nolint:gosec // the path is the administrator's
	if err != nil || json.Unmarshal(content, &c) != nil {
		c = observe.Cluster{} // none yet, or none that can be used: it will be written anew
	}
	c.NotReady, c.Degraded, c.NetworkProblems, c.Lost, c.APIServer = starting, nil, nil, time.Time{}, ""
	_, err = writeCluster(path, c)
	return c, err
}

func writeCluster(path string, c observe.Cluster) (content []byte, err error) {
	content, err = json.Marshal(c)
	if err != nil {
		return nil, fmt.Errorf("encode the file for ebpfctl: %w", err)
	}
	content = append(content, '\n')
	if err := replaceFile(path, content); err != nil {
		return nil, fmt.Errorf("write the file for ebpfctl: %w", err)
	}
	return content, nil
}
