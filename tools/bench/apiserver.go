package main

import (
	"cmp"
	"context"
	"encoding/binary"
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

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/ebpf-cni/ebpf-cni/test/lab"
	"github.com/ebpf-cni/ebpf-cni/tools/bench/result"
)

// betweenBookmarks is how often a watch is told of the version that it has reached.
const betweenBookmarks = time.Minute

// apiServer is as much of a Kubernetes API server as an agent's view of a cluster takes: lists, watches that begin with what is there or resume, bookmarks, and
// the writing of a Node's conditions. It speaks protobuf only, and each Node's status is renewed as by a kubelet.
type apiServer struct {
	lab    *lab.Lab
	addr   string // the same on the loopback of each node; empty before the first listen
	server *http.Server
	end    context.CancelFunc
	ended  sync.WaitGroup

	// resources are by the path of their list; those that the server does not have, it does not know.
	resources map[string]*resource
	nodes     *resource

	mu      sync.Mutex
	version int
	changed chan struct{} // closed with the next version
}

// resource are all objects of a kind.
type resource struct {
	kind     metav1.TypeMeta
	index    map[string]int // by name
	objects  []served
	watching int
	streams  int // how often all objects were sent
}

// object is one of the API.
type object interface {
	metav1.Object
	Marshal() ([]byte, error)
}

// served is an object as it is now.
type served struct {
	object  object
	version int
	encoded []byte
}

func newAPIServer(specs []lab.NodeSpec) (*apiServer, error) {
	s := &apiServer{changed: make(chan struct{}), resources: map[string]*resource{}}
	nodes, err := nodeObjects(specs...)
	if err != nil {
		return nil, err
	}
	all := make([]object, len(nodes))
	for i := range nodes {
		all[i] = &nodes[i]
	}
	s.nodes, err = s.add(nodesPath, metav1.TypeMeta{APIVersion: "v1", Kind: "Node"}, all)
	return s, err
}

// add has the server know objects of another kind.
func (s *apiServer) add(path string, kind metav1.TypeMeta, objects []object) (*resource, error) {
	r := &resource{kind: kind, index: map[string]int{}, objects: make([]served, len(objects))}
	s.mu.Lock()
	defer s.mu.Unlock()
	for i, o := range objects {
		r.index[o.GetName()] = i
		if err := s.set(r, i, o); err != nil {
			return nil, err
		}
	}
	s.resources[path] = r
	return r, nil
}

// serveNodes serves the Nodes, and an ordinary number of Services, on the loopback of the lab's nodes, and has their agents ask there until it is closed.
func serveNodes(l *lab.Lab, specs []lab.NodeSpec) (*apiServer, error) {
	s, err := newAPIServer(specs)
	if err != nil {
		return nil, err
	}
	s.lab = l
	if _, err := serveMany(s, manyServices(result.OrdinaryServices, specs)); err != nil {
		return nil, err
	}
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

// set makes an object what it is from now on. The caller holds the lock.
func (s *apiServer) set(r *resource, i int, o object) error {
	o.SetResourceVersion(strconv.Itoa(s.version + 1))
	encoded, err := encode(r.kind, o)
	if err != nil {
		return err
	}
	s.version++
	r.objects[i] = served{o, s.version, encoded}
	close(s.changed)
	s.changed = make(chan struct{})
	return nil
}

// publish sends an object's change, if anybody hears of it.
func (s *apiServer) publish(r *resource, i int, o object) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if r.watching == 0 {
		return fmt.Errorf("the agent does not watch objects of kind %s", r.kind.Kind)
	}
	return s.set(r, i, o)
}

const protobuf = runtime.ContentTypeProtobuf

// ServeHTTP implements http.Handler.
func (s *apiServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Content-Type", protobuf)
	name, ofNode := strings.CutPrefix(strings.TrimSuffix(r.URL.Path, "/status"), nodesPath+"/")
	of := s.resource(r.URL.Path)
	switch {
	case !strings.Contains(r.Header.Get("Accept"), protobuf):
		http.Error(w, "only protobuf is spoken here", http.StatusNotAcceptable)
	case r.Method == http.MethodPatch && ofNode:
		s.patch(w, r, name)
	case r.Method != http.MethodGet || of == nil:
		http.NotFound(w, r)
	case r.URL.Query().Get("watch") != "":
		w.Header().Set("Content-Type", protobuf+";stream=watch")
		s.watch(w, r, of)
	default:
		s.list(w, of)
	}
}

// resource is what is listed at a path; nil where there is none.
func (s *apiServer) resource(path string) *resource {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.resources[path]
}

func (s *apiServer) list(w http.ResponseWriter, of *resource) {
	newer, version, _ := s.since(of, 0)
	s.sends(of)
	encoded, err := of.list(newer, version)
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	_, _ = w.Write(encoded)
}

// since are the objects that have changed since a version, in that order.
func (s *apiServer) since(of *resource, known int) (newer []served, version int, changed <-chan struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, o := range of.objects {
		if o.version > known {
			newer = append(newer, o)
		}
	}
	slices.SortFunc(newer, func(a, b served) int { return a.version - b.version })
	return newer, s.version, s.changed
}

// watch sends what is there, where it is asked for, and then what changes until the client has enough.
func (s *apiServer) watch(w http.ResponseWriter, r *http.Request, of *resource) {
	query := r.URL.Query()
	ctx := r.Context()
	if seconds, _ := strconv.Atoi(query.Get("timeoutSeconds")); seconds > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, time.Duration(seconds)*time.Second)
		defer cancel()
	}
	s.watches(of, 1)
	defer s.watches(of, -1)
	known, kind := 0, "ADDED"
	if query.Get("sendInitialEvents") != "" {
		s.sends(of)
	} else {
		known, _ = strconv.Atoi(query.Get("resourceVersion"))
		kind = "MODIFIED"
	}
	bookmark := time.NewTicker(betweenBookmarks)
	defer bookmark.Stop()
	for err := error(nil); err == nil; {
		newer, version, changed := s.since(of, known)
		for _, n := range newer {
			err = errors.Join(err, event(w, kind, n.encoded))
		}
		if kind == "ADDED" {
			err = errors.Join(err, of.mark(w, version, map[string]string{metav1.InitialEventsAnnotationKey: "true"}))
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
			err = of.mark(w, known, nil)
		}
	}
}

func (s *apiServer) watches(of *resource, more int) {
	s.mu.Lock()
	of.watching += more
	s.mu.Unlock()
}

func (s *apiServer) sends(of *resource) {
	s.mu.Lock()
	of.streams++
	s.mu.Unlock()
}

// mark sends a bookmark: an object of the kind without anything but metadata, which is the first field of each.
func (r *resource) mark(w http.ResponseWriter, version int, annotations map[string]string) error {
	raw, err := (&metav1.ObjectMeta{ResourceVersion: strconv.Itoa(version), Annotations: annotations}).Marshal()
	if err != nil {
		return err
	}
	encoded, err := envelope(r.kind, appendField(nil, 1, raw))
	if err != nil {
		return err
	}
	return event(w, "BOOKMARK", encoded)
}

// list encodes a list: its metadata are the first field of each kind's, and its items the second.
func (r *resource) list(all []served, version int) ([]byte, error) {
	metadata, err := (&metav1.ListMeta{ResourceVersion: strconv.Itoa(version)}).Marshal()
	if err != nil {
		return nil, err
	}
	list := appendField(nil, 1, metadata)
	for _, o := range all {
		raw, err := o.object.Marshal()
		if err != nil {
			return nil, err
		}
		list = appendField(list, 2, raw)
	}
	kind := r.kind
	kind.Kind += "List"
	return envelope(kind, list)
}

// appendField appends a field of protobuf that has a size.
func appendField(to []byte, number byte, content []byte) []byte {
	const sized = 2
	return append(binary.AppendUvarint(append(to, number<<3|sized), uint64(len(content))), content...)
}

// event sends an event of a watch, with its length before it.
func event(w http.ResponseWriter, kind string, encoded []byte) error {
	frame, err := (&metav1.WatchEvent{Type: kind, Object: runtime.RawExtension{Raw: encoded}}).Marshal()
	if err == nil {
		_, err = w.Write(append(binary.BigEndian.AppendUint32(nil, uint32(len(frame))), frame...))
	}
	return err
}

// encode is an object as protobuf has it in the API.
func encode(kind metav1.TypeMeta, o object) ([]byte, error) {
	raw, err := o.Marshal()
	if err != nil {
		return nil, fmt.Errorf("encode a %s: %w", kind.Kind, err)
	}
	return envelope(kind, raw)
}

// envelope is an encoded object with its kind, after four bytes that say so.
func envelope(kind metav1.TypeMeta, raw []byte) ([]byte, error) {
	with, err := (&runtime.Unknown{TypeMeta: runtime.TypeMeta{APIVersion: kind.APIVersion, Kind: kind.Kind}, Raw: raw}).Marshal()
	if err != nil {
		return nil, fmt.Errorf("encode a %s: %w", kind.Kind, err)
	}
	return append([]byte("k8s\x00"), with...), nil
}
