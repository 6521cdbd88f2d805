// Package health answers who asks whether a node serves Services, with the paths, codes, headers and words of kube-proxy: those are what load
// balancers, their controllers and monitoring are made for. It owns the form of the answers. What they say is passed in, and who
// listens where is the agent's.
//
//	http.Serve(listener, health.Node(func() health.State { ... }))
package health

import (
	"encoding/json"
	"net/http"
	"strconv"
	"time"
)

// State is what a node says of itself.
type State struct {
	// Healthy says that Services are served as the cluster has them, but for changes of the last moments.
	Healthy bool
	// Updated is when that was last certain.
	Updated time.Time
	// Eligible says that the Node is there and stays.
	Eligible bool
}

// Serves says whether new connections are to come to the node.
func (s State) Serves() bool { return s.Healthy && s.Eligible }

// family is how one family of addresses is served. The maps hold both, so both are served alike.
type family struct {
	LastUpdated time.Time `json:"lastUpdated"`
	Healthy     bool      `json:"healthy"`
}

// nodeAnswer is what is answered for the node as a whole.
type nodeAnswer struct {
	LastUpdated  time.Time         `json:"lastUpdated"`
	CurrentTime  time.Time         `json:"currentTime"`
	NodeEligible *bool             `json:"nodeEligible,omitempty"`
	Healthy      bool              `json:"healthy"`
	Status       map[string]family `json:"status"`
}

// Node answers /healthz, which says whether new connections are to come here, and /livez, which does not mind that the Node leaves.
func Node(state func() State) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("/healthz", func(w http.ResponseWriter, _ *http.Request) {
		s := state()
		answerNode(w, s, s.Serves(), &s.Eligible)
	})
	mux.HandleFunc("/livez", func(w http.ResponseWriter, _ *http.Request) {
		s := state()
		answerNode(w, s, s.Healthy, nil)
	})
	return mux
}

func answerNode(w http.ResponseWriter, s State, well bool, eligible *bool) {
	of := family{s.Updated, s.Healthy}
	a := nodeAnswer{s.Updated, time.Now(), eligible, s.Healthy, map[string]family{"IPv4": of, "IPv6": of}}
	if well {
		a.LastUpdated = a.CurrentTime
	}
	text, _ := json.Marshal(a) // fails for no such value
	answer(w, well, text)
}

// serviceAnswer is what is answered for one Service.
type serviceAnswer struct {
	Service struct {
		Namespace string `json:"namespace"`
		Name      string `json:"name"`
	} `json:"service"`
	LocalEndpoints      int  `json:"localEndpoints"`
	ServiceProxyHealthy bool `json:"serviceProxyHealthy"`
}

// Service answers for one Service on any path: whether its load balancer is to send here, which is where endpoints are ready. Between
// nodes their numbers are weights.
func Service(namespace, name string, ready func() int, state func() State) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		a := serviceAnswer{LocalEndpoints: ready(), ServiceProxyHealthy: state().Healthy}
		a.Service.Namespace, a.Service.Name = namespace, name
		w.Header().Set("X-Load-Balancing-Endpoint-Weight", strconv.Itoa(a.LocalEndpoints))
		text, _ := json.MarshalIndent(a, "", "\t") // fails for no such value
		answer(w, a.LocalEndpoints > 0 && a.ServiceProxyHealthy, text)
	})
}

func answer(w http.ResponseWriter, well bool, text []byte) {
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	if !well {
		w.WriteHeader(http.StatusServiceUnavailable)
	}
	_, _ = w.Write(text)
}

// Mode answers /proxyMode, and /metrics with those that are passed in.
func Mode(mode string, metrics http.Handler) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("/proxyMode", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		w.Header().Set("X-Content-Type-Options", "nosniff")
		_, _ = w.Write([]byte(mode))
	})
	mux.Handle("/metrics", metrics)
	return mux
}
