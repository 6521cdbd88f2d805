package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"time"

	"github.com/ebpf-cni/ebpf-cni/test/lab"
)

// apiServer is as much of a Kubernetes API server as an agent's view of Nodes takes: a list, and watches that tell of the last change.
type apiServer struct {
	list []byte

	mu       sync.Mutex
	version  int
	event    []byte        // that made the version
	changed  chan struct{} // closed with the next version
	watching int
}

// serveNodes serves the nodes on the loopback of the lab's node, and has its agents ask there until it is closed.
func serveNodes(l *lab.Lab, specs func(variant int) []lab.NodeSpec) (source, error) {
	node, s := l.Nodes[0], &apiServer{version: 1, changed: make(chan struct{})}
	items, err := nodeObjects(specs(0)...)
	if err != nil {
		return source{}, err
	}
	s.list, err = json.Marshal(map[string]any{"kind": "NodeList", "apiVersion": "v1", "metadata": map[string]string{"resourceVersion": "1"}, "items": items})
	if err != nil {
		return source{}, fmt.Errorf("write a list of nodes: %w", err)
	}
	var listener net.Listener
	err = node.Do(func() (err error) {
		listener, err = net.Listen("tcp4", "127.0.0.1:0")
		return err
	})
	if err != nil {
		return source{}, fmt.Errorf("listen on %s: %w", node.Name, err)
	}
	server := &http.Server{Handler: s, ReadHeaderTimeout: time.Minute}
	go func() { _ = server.Serve(listener) }() // until it is closed
	node.Kubeconfig = filepath.Join(l.Dir, "kubeconfig")
	config := fmt.Sprintf(`{"kind": "Config", "apiVersion": "v1", "current-context": "lab",
  "clusters": [{"name": "lab", "cluster": {"server": "http://%s"}}], "contexts": [{"name": "lab", "context": {"cluster": "lab"}}]}`, listener.Addr())
	if err := os.WriteFile(node.Kubeconfig, []byte(config), 0o600); err != nil {
		return source{}, errors.Join(fmt.Errorf("write a kubeconfig: %w", err), server.Close())
	}
	return source{
		stage: func(variant int) (func() error, error) {
			all := specs(variant)
			return s.stage(all[len(all)-1])
		},
		close: func() error {
			node.Kubeconfig = ""
			return server.Close()
		},
	}, nil
}

// nodeObjects are Nodes as the API has them.
func nodeObjects(specs ...lab.NodeSpec) ([]map[string]any, error) {
	raw, err := lab.NodeListJSON(specs...)
	if err != nil {
		return nil, err
	}
	var list struct {
		Items []map[string]any `json:"items"`
	}
	if err := json.Unmarshal(raw, &list); err != nil {
		return nil, fmt.Errorf("read a list of nodes: %w", err)
	}
	return list.Items, nil
}

// ServeHTTP implements http.Handler.
func (s *apiServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	query := r.URL.Query()
	switch {
	case r.Method != http.MethodGet || r.URL.Path != "/api/v1/nodes":
		refuse(w, http.StatusNotFound, "NotFound")
	case query.Get("sendInitialEvents") != "":
		refuse(w, http.StatusUnprocessableEntity, "Invalid") // it then asks for a list, as older servers have it
	case query.Get("watch") != "":
		s.watch(w, r)
	default:
		_, _ = w.Write(s.list) // who does not wait for it does not want it
	}
}

func refuse(w http.ResponseWriter, code int, reason string) {
	w.WriteHeader(code)
	fmt.Fprintf(w, `{"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": %q, "code": %d}`, reason, code)
}

func (s *apiServer) watch(w http.ResponseWriter, r *http.Request) {
	known, _ := strconv.Atoi(r.URL.Query().Get("resourceVersion"))
	s.mu.Lock()
	s.watching++
	for err := error(nil); err == nil && r.Context().Err() == nil; {
		event, version, changed := s.event, s.version, s.changed
		s.mu.Unlock()
		if version > known {
			known = version
			_, err = w.Write(event)
		}
		if err = errors.Join(err, http.NewResponseController(w).Flush()); err == nil {
			select {
			case <-r.Context().Done():
			case <-changed:
			}
		}
		s.mu.Lock()
	}
	s.watching--
	s.mu.Unlock()
}

// stage prepares the event of a node's change. The function returned sends it.
func (s *apiServer) stage(changed lab.NodeSpec) (publish func() error, err error) {
	objects, err := nodeObjects(changed)
	if err != nil {
		return nil, err
	}
	objects[0]["metadata"].(map[string]any)["resourceVersion"] = strconv.Itoa(s.version + 1)
	event, err := json.Marshal(map[string]any{"type": "MODIFIED", "object": objects[0]})
	if err != nil {
		return nil, fmt.Errorf("write an event: %w", err)
	}
	return func() error {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.watching == 0 {
			return errors.New("the agent does not watch the nodes")
		}
		close(s.changed)
		s.version, s.event, s.changed = s.version+1, event, make(chan struct{})
		return nil
	}, nil
}
