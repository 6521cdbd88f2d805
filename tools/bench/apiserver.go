package main

import (
	"cmp"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/ebpf-cni/ebpf-cni/test/lab"
)

const (
	// renewal is how often a kubelet writes its Node's status when nothing changes.
	renewal = 5 * time.Minute
	// betweenBookmarks is how often a watch is told of the version that it has reached.
	betweenBookmarks = time.Minute
)

// apiServer is as much of a Kubernetes API server as an agent's view of Nodes takes: a list, watches that begin with what is there or resume, bookmarks, and
// the writing of a condition. It speaks protobuf only, and each Node's status is renewed as by a kubelet.
type apiServer struct {
	lab    *lab.Lab
	addr   string // the same on the loopback of each node; empty before the first listen
	server *http.Server
	end    context.CancelFunc
	ended  sync.WaitGroup

	index map[string]int // of the Nodes, by name

	mu       sync.Mutex
	nodes    []served
	version  int
	changed  chan struct{} // closed with the next version
	watching int
	streams  int // how often all Nodes were sent
}

// served is a Node as it is now.
type served struct {
	node    *corev1.Node
	version int
	encoded []byte
}

func newAPIServer(specs []lab.NodeSpec) (*apiServer, error) {
	s := &apiServer{changed: make(chan struct{}), nodes: make([]served, len(specs)), index: map[string]int{}}
	nodes, err := nodeObjects(specs...)
	if err != nil {
		return nil, err
	}
	for i := range nodes {
		s.index[nodes[i].Name] = i
		if err := s.set(i, &nodes[i]); err != nil {
			return nil, err
		}
	}
	return s, nil
}

// serveNodes serves the Nodes on the loopback of the lab's nodes, and has their agents ask there until it is closed.
func serveNodes(l *lab.Lab, specs []lab.NodeSpec) (*apiServer, error) {
	s, err := newAPIServer(specs)
	if err != nil {
		return nil, err
	}
	s.lab = l
	if err := s.listen(); err != nil {
		return nil, err
	}
	file := filepath.Join(l.Dir, "kubeconfig")
	if err := os.WriteFile(file, []byte(kubeconfig(s.addr)), 0o600); err != nil {
		return nil, errors.Join(fmt.Errorf("write a kubeconfig: %w", err), s.lose())
	}
	for _, node := range l.Nodes {
		node.Kubeconfig = file
	}
	ctx, end := context.WithCancel(context.Background())
	s.end = end
	s.ended.Go(func() { s.renew(ctx) })
	return s, nil
}

// kubeconfig leads a client there.
func kubeconfig(addr string) string {
	return fmt.Sprintf(`{"kind": "Config", "apiVersion": "v1", "current-context": "lab",
  "clusters": [{"name": "lab", "cluster": {"server": "http://%s"}}], "contexts": [{"name": "lab", "context": {"cluster": "lab"}}]}`, addr)
}

func (s *apiServer) close() error {
	s.end()
	err := s.lose()
	s.ended.Wait()
	for _, node := range s.lab.Nodes {
		node.Kubeconfig = ""
	}
	return err
}

// listen begins to serve, or begins again at the same address.
func (s *apiServer) listen() error {
	s.server = &http.Server{Handler: s, ReadHeaderTimeout: time.Minute}
	for _, node := range s.lab.Nodes {
		var listener net.Listener
		err := node.Do(func() (err error) {
			listener, err = net.Listen("tcp4", cmp.Or(s.addr, "127.0.0.1:0"))
			return err
		})
		if err != nil {
			return errors.Join(fmt.Errorf("listen on %s: %w", node.Name, err), s.lose())
		}
		s.addr = listener.Addr().String()
		s.ended.Go(func() { _ = s.server.Serve(listener) }) // until it is lost
	}
	return nil
}

// lose ends all connections, and has new ones refused.
func (s *apiServer) lose() error { return s.server.Close() }

// renew renews the status of one Node after the other.
func (s *apiServer) renew(ctx context.Context) {
	tick := time.NewTicker(renewal / time.Duration(len(s.nodes)))
	defer tick.Stop()
	for i := 0; ; i = (i + 1) % len(s.nodes) {
		select {
		case <-ctx.Done():
			return
		case now := <-tick.C:
			_, _ = s.update(i, func(status *corev1.NodeStatus) { // what was encoded once is encoded again
				for c := range status.Conditions {
					status.Conditions[c].LastHeartbeatTime = metav1.NewTime(now)
				}
			})
		}
	}
}

// update changes the status of a Node, and returns the Node encoded.
func (s *apiServer) update(i int, change func(*corev1.NodeStatus)) ([]byte, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	node := *s.nodes[i].node
	node.Status.Conditions = slices.Clone(node.Status.Conditions)
	change(&node.Status)
	err := s.set(i, &node)
	return s.nodes[i].encoded, err
}

// set makes a Node what it is from now on. The caller holds the lock.
func (s *apiServer) set(i int, node *corev1.Node) error {
	node.ResourceVersion = strconv.Itoa(s.version + 1)
	encoded, err := encode("Node", node)
	if err != nil {
		return err
	}
	s.version++
	s.nodes[i] = served{node, s.version, encoded}
	close(s.changed)
	s.changed = make(chan struct{})
	return nil
}

// stage prepares a Node's change. The function returned sends it.
func (s *apiServer) stage(i int, spec lab.NodeSpec) (publish func() error, err error) {
	nodes, err := nodeObjects(spec)
	if err != nil {
		return nil, err
	}
	return func() error {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.watching == 0 {
			return errors.New("the agent does not watch the Nodes")
		}
		return s.set(i, &nodes[0])
	}, nil
}

const protobuf = runtime.ContentTypeProtobuf

// ServeHTTP implements http.Handler.
func (s *apiServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Content-Type", protobuf)
	name, ofNode := strings.CutPrefix(strings.TrimSuffix(r.URL.Path, "/status"), "/api/v1/nodes/")
	switch {
	case !strings.Contains(r.Header.Get("Accept"), protobuf):
		http.Error(w, "only protobuf is spoken here", http.StatusNotAcceptable)
	case r.Method == http.MethodPatch && ofNode:
		s.patch(w, r, name)
	case r.Method != http.MethodGet || r.URL.Path != "/api/v1/nodes":
		http.NotFound(w, r)
	case r.URL.Query().Get("watch") != "":
		w.Header().Set("Content-Type", protobuf+";stream=watch")
		s.watch(w, r)
	default:
		s.list(w)
	}
}

// patch writes the conditions that a patch names.
func (s *apiServer) patch(w http.ResponseWriter, r *http.Request, name string) {
	var body struct {
		Status struct{ Conditions []corev1.NodeCondition }
	}
	i, known := s.index[name]
	err := json.NewDecoder(r.Body).Decode(&body)
	if !known || err != nil {
		http.Error(w, fmt.Sprintf("no Node %q, or no patch: %v", name, err), http.StatusBadRequest)
		return
	}
	encoded, err := s.update(i, func(status *corev1.NodeStatus) {
		for _, condition := range body.Status.Conditions {
			status.Conditions = slices.DeleteFunc(status.Conditions, func(c corev1.NodeCondition) bool { return c.Type == condition.Type })
			status.Conditions = append(status.Conditions, condition)
		}
	})
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	_, _ = w.Write(encoded) // who does not wait for it does not want it
}

func (s *apiServer) list(w http.ResponseWriter) {
	newer, version, _ := s.since(0)
	s.sends()
	list := &corev1.NodeList{ListMeta: metav1.ListMeta{ResourceVersion: strconv.Itoa(version)}}
	for _, n := range newer {
		list.Items = append(list.Items, *n.node)
	}
	encoded, err := encode("NodeList", list)
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	_, _ = w.Write(encoded)
}

// since are the Nodes that have changed since a version, in that order.
func (s *apiServer) since(known int) (newer []served, version int, changed <-chan struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, n := range s.nodes {
		if n.version > known {
			newer = append(newer, n)
		}
	}
	slices.SortFunc(newer, func(a, b served) int { return a.version - b.version })
	return newer, s.version, s.changed
}

// watch sends what is there, where it is asked for, and then what changes until the client has enough.
func (s *apiServer) watch(w http.ResponseWriter, r *http.Request) {
	query := r.URL.Query()
	ctx := r.Context()
	if seconds, _ := strconv.Atoi(query.Get("timeoutSeconds")); seconds > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, time.Duration(seconds)*time.Second)
		defer cancel()
	}
	s.watches(1)
	defer s.watches(-1)
	known, kind := 0, "ADDED"
	if query.Get("sendInitialEvents") != "" {
		s.sends()
	} else {
		known, _ = strconv.Atoi(query.Get("resourceVersion"))
		kind = "MODIFIED"
	}
	bookmark := time.NewTicker(betweenBookmarks)
	defer bookmark.Stop()
	for err := error(nil); err == nil; {
		newer, version, changed := s.since(known)
		for _, n := range newer {
			err = errors.Join(err, event(w, kind, n.encoded))
		}
		if kind == "ADDED" {
			err = errors.Join(err, mark(w, version, map[string]string{metav1.InitialEventsAnnotationKey: "true"}))
		}
		known, kind = version, "MODIFIED"
		if err = errors.Join(err, http.NewResponseController(w).Flush()); err != nil {
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-changed:
		case <-bookmark.C:
			err = mark(w, known, nil)
		}
	}
}

func (s *apiServer) watches(more int) {
	s.mu.Lock()
	s.watching += more
	s.mu.Unlock()
}

func (s *apiServer) sends() {
	s.mu.Lock()
	s.streams++
	s.mu.Unlock()
}

// mark sends a bookmark.
func mark(w http.ResponseWriter, version int, annotations map[string]string) error {
	encoded, err := encode("Node", &corev1.Node{ObjectMeta: metav1.ObjectMeta{ResourceVersion: strconv.Itoa(version), Annotations: annotations}})
	if err != nil {
		return err
	}
	return event(w, "BOOKMARK", encoded)
}

// event sends an event of a watch, with its length before it.
func event(w http.ResponseWriter, kind string, encoded []byte) error {
	frame, err := (&metav1.WatchEvent{Type: kind, Object: runtime.RawExtension{Raw: encoded}}).Marshal()
	if err == nil {
		_, err = w.Write(append(binary.BigEndian.AppendUint32(nil, uint32(len(frame))), frame...))
	}
	return err
}

// encode is an object as protobuf has it in the API: after four bytes that say so, in an envelope with its kind.
func encode(kind string, object interface{ Marshal() ([]byte, error) }) ([]byte, error) {
	raw, err := object.Marshal()
	if err != nil {
		return nil, fmt.Errorf("encode a %s: %w", kind, err)
	}
	envelope, err := (&runtime.Unknown{TypeMeta: runtime.TypeMeta{APIVersion: "v1", Kind: kind}, Raw: raw}).Marshal()
	if err != nil {
		return nil, fmt.Errorf("encode a %s: %w", kind, err)
	}
	return append([]byte("k8s\x00"), envelope...), nil
}
