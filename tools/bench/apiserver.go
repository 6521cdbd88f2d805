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

// apiServer is as much of a Kubernetes API server as an agent's view of Nodes takes: a list, and a watch that tells of each change.
type apiServer struct {
	http  *http.Server
	node  *lab.Node
	specs func(variant int) []lab.NodeSpec
	list  []byte

	mu      sync.Mutex
	version int
	// watches are the agent's open ones; each is sent every event.
	watches map[chan []byte]bool
}

// serveNodes serves the nodes on the loopback of the node, and has its agents ask there until it is closed.
func serveNodes(l *lab.Lab, node *lab.Node, specs func(variant int) []lab.NodeSpec) (*apiServer, error) {
	s := &apiServer{node: node, specs: specs, version: 1, watches: map[chan []byte]bool{}}
	items, err := nodeObjects(specs(0)...)
	if err != nil {
		return nil, err
	}
	s.list, err = json.Marshal(map[string]any{"kind": "NodeList", "apiVersion": "v1", "metadata": map[string]string{"resourceVersion": "1"}, "items": items})
	if err != nil {
		return nil, fmt.Errorf("write a list of nodes: %w", err)
	}
	var listener net.Listener
	err = node.Do(func() (err error) {
		listener, err = net.Listen("tcp4", "127.0.0.1:0")
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("listen on %s: %w", node.Name, err)
	}
	s.http = &http.Server{Handler: s, ReadHeaderTimeout: time.Minute}
	go func() { _ = s.http.Serve(listener) }() // until it is closed
	node.Kubeconfig = filepath.Join(l.Dir, "kubeconfig")
	config := fmt.Sprintf(`{"kind": "Config", "apiVersion": "v1", "current-context": "lab",
  "clusters": [{"name": "lab", "cluster": {"server": "http://%s"}}], "contexts": [{"name": "lab", "context": {"cluster": "lab"}}]}`, listener.Addr())
	if err := os.WriteFile(node.Kubeconfig, []byte(config), 0o600); err != nil {
		return nil, errors.Join(fmt.Errorf("write a kubeconfig: %w", err), s.close())
	}
	return s, nil
}

func (s *apiServer) close() error {
	s.node.Kubeconfig = ""
	return s.http.Close()
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
	out := http.NewResponseController(w)
	if err := out.Flush(); err != nil {
		return
	}
	events := make(chan []byte, 16)
	s.mu.Lock()
	s.watches[events] = true
	s.mu.Unlock()
	defer func() {
		s.mu.Lock()
		delete(s.watches, events)
		s.mu.Unlock()
	}()
	for {
		select {
		case <-r.Context().Done():
			return
		case event := <-events:
			if _, err := w.Write(event); err != nil || out.Flush() != nil {
				return
			}
		}
	}
}

// stage prepares the event of the last node's change. The function returned sends it.
func (s *apiServer) stage(variant int) (publish func() error, err error) {
	specs := s.specs(variant)
	objects, err := nodeObjects(specs[len(specs)-1])
	if err != nil {
		return nil, err
	}
	s.version++
	objects[0]["metadata"].(map[string]any)["resourceVersion"] = strconv.Itoa(s.version)
	event, err := json.Marshal(map[string]any{"type": "MODIFIED", "object": objects[0]})
	if err != nil {
		return nil, fmt.Errorf("write an event: %w", err)
	}
	return func() error {
		s.mu.Lock()
		defer s.mu.Unlock()
		if len(s.watches) == 0 {
			return errors.New("the agent does not watch the nodes")
		}
		for watch := range s.watches {
			watch <- event
		}
		return nil
	}, nil
}
