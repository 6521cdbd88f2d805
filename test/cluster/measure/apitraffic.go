package measure

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/vishvananda/netlink"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/ebpf-cni/ebpf-cni/test/cluster"
)

// received is what the connections to other hosts that a process has open were sent, in bytes, TLS included.
func received(node *cluster.Machine, pid int) (sum float64, err error) {
	files, err := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", pid))
	if err != nil {
		return 0, err
	}
	own := map[string]bool{}
	for _, file := range files {
		if to, err := os.Readlink(file); err == nil { // not closed meanwhile
			own[to] = true
		}
	}
	var sockets []*netlink.InetDiagTCPInfoResp
	err = node.Do(func() (err error) {
		sockets, err = netlink.SocketDiagTCPInfo(syscall.AF_INET)
		return err
	})
	if err != nil {
		return 0, fmt.Errorf("list the connections of %s: %w", node.Name, err)
	}
	for _, s := range sockets {
		if own[fmt.Sprintf("socket:[%d]", s.InetDiagMsg.INode)] && s.TCPInfo != nil && !s.InetDiagMsg.ID.Destination.IsLoopback() {
			sum += float64(s.TCPInfo.Bytes_received)
		}
	}
	if sum == 0 {
		return 0, fmt.Errorf("process %d of %s has received nothing", pid, node.Name)
	}
	return sum, nil
}

// The forms in which the API server sends objects.
const (
	inProtobuf = "application/vnd.kubernetes.protobuf"
	inJSON     = "application/json"
)

// ask asks for the Nodes on a connection of its own, for all of the answer or until the context ends, and says what came, in bytes, TLS included.
func (s *sweep) ask(ctx context.Context, accept string, compressed bool, params ...string) (float64, error) {
	config, err := s.cluster.Config()
	if err != nil {
		return 0, err
	}
	var read atomic.Int64
	dial := config.Dial
	config.Dial = func(ctx context.Context, network, address string) (net.Conn, error) {
		conn, err := dial(ctx, network, address)
		return counted{conn, &read}, err
	}
	config.DisableCompression = !compressed
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return 0, err
	}
	request := client.CoreV1().RESTClient().Get().AbsPath("/api/v1/nodes").SetHeader("Accept", accept)
	for i := 0; i < len(params); i += 2 {
		request = request.Param(params[i], params[i+1])
	}
	answer, err := request.Stream(ctx)
	if err == nil {
		_, err = io.Copy(io.Discard, answer)
		err = errors.Join(err, answer.Close())
	}
	if err != nil && ctx.Err() == nil {
		return 0, fmt.Errorf("ask for the Nodes as %s: %w", accept, err)
	}
	return float64(read.Load()), nil
}

// watchJSON watches the Nodes in JSON while agents rest, and says how many bytes a second came.
func (s *sweep) watchJSON(ctx context.Context) (perSecond float64, err error) {
	one, err := s.client.CoreV1().Nodes().List(ctx, metav1.ListOptions{Limit: 1})
	if err != nil {
		return 0, fmt.Errorf("find the version to watch from: %w", err)
	}
	timed, cancel := context.WithTimeout(ctx, s.Rest)
	defer cancel()
	got, err := s.ask(timed, inJSON, true, "watch", "true", "resourceVersion", one.ResourceVersion)
	return got / s.Rest.Seconds(), errors.Join(err, ctx.Err())
}

// lists measures what a list of all Nodes is, from the API server's cache, in each form that it can be asked for.
func (s *sweep) lists(ctx context.Context) error {
	values := map[string]float64{}
	for name, form := range map[string]struct {
		accept     string
		compressed bool
	}{
		"list": {inProtobuf, false}, "list-gzip": {inProtobuf, true}, "list-json": {inJSON, false}, "list-json-gzip": {inJSON, true},
	} {
		got, err := s.ask(ctx, form.accept, form.compressed, "resourceVersion", "0")
		if err != nil {
			return err
		}
		values[name] = got
		s.say("%d Nodes: a %s is %.1f MiB", s.known, name, got/(1<<20))
	}
	return s.line(Sample{Workload: Agent, Mode: ours, Point: s.known, Round: 1, Started: time.Now(), Values: values})
}

// counted is a connection whose bytes are counted.
type counted struct {
	net.Conn
	read *atomic.Int64
}

func (c counted) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	c.read.Add(int64(n))
	return n, err
}
