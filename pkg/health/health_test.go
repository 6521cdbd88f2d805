package health

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// asked is what a client gets.
type asked struct {
	code   int
	header http.Header
	body   string
}

func ask(t *testing.T, h http.Handler, method, path string) asked {
	t.Helper()
	srv := httptest.NewServer(h)
	defer srv.Close()
	request, err := http.NewRequestWithContext(t.Context(), method, srv.URL+path, nil)
	if err != nil {
		t.Fatal(err)
	}
	response, err := srv.Client().Do(request)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	if err != nil {
		t.Fatal(err)
	}
	return asked{response.StatusCode, response.Header, string(body)}
}

func (a asked) wantHeaders(t *testing.T, want map[string]string) {
	t.Helper()
	for name, value := range want {
		if got := a.header.Get(name); got != value {
			t.Errorf("%s is %q, want %q", name, got, value)
		}
	}
}

func TestNode(t *testing.T) {
	updated := time.Date(2026, 1, 2, 3, 4, 5, 678, time.UTC)
	for _, c := range []struct {
		what           string
		state          State
		healthz, livez int
	}{
		{"well", State{true, updated, true}, 200, 200},
		{"the Node leaves", State{true, updated, false}, 503, 200},
		{"not in step", State{false, updated, true}, 503, 503},
		{"neither", State{false, updated, false}, 503, 503},
	} {
		for path, code := range map[string]int{"/healthz": c.healthz, "/livez": c.livez} {
			t.Run(c.what+path, func(t *testing.T) {
				before := time.Now()
				got := ask(t, Node(func() State { return c.state }), http.MethodGet, path)
				if got.code != code {
					t.Errorf("code %d, want %d", got.code, code)
				}
				got.wantHeaders(t, map[string]string{"Content-Type": "application/json", "X-Content-Type-Options": "nosniff"})
				var at struct{ LastUpdated, CurrentTime time.Time }
				if err := json.Unmarshal([]byte(got.body), &at); err != nil {
					t.Fatal(err)
				}
				if at.CurrentTime.Before(before) || at.CurrentTime.After(time.Now()) {
					t.Errorf("the current time %s", at.CurrentTime)
				}
				if want := map[int]time.Time{200: at.CurrentTime, 503: updated}[code]; !at.LastUpdated.Equal(want) {
					t.Errorf("last updated %s, want %s", at.LastUpdated, want)
				}
				eligible := ""
				if path == "/healthz" {
					eligible = fmt.Sprintf(`"nodeEligible":%t,`, c.state.Eligible)
				}
				of := fmt.Sprintf(`{"lastUpdated":"2026-01-02T03:04:05.000000678Z","healthy":%t}`, c.state.Healthy)
				if want := fmt.Sprintf(`{"lastUpdated":%s,"currentTime":%s,%s"healthy":%t,"status":{"IPv4":%s,"IPv6":%s}}`,
					asJSON(at.LastUpdated), asJSON(at.CurrentTime), eligible, c.state.Healthy, of, of); got.body != want {
					t.Errorf("the answer\n%s\nwant\n%s", got.body, want)
				}
			})
		}
	}
	if got := ask(t, Node(func() State { return State{Healthy: true, Eligible: true} }), http.MethodHead, "/healthz"); got.code != 200 {
		t.Errorf("HEAD: code %d", got.code)
	}
	if got := ask(t, Node(nil), http.MethodGet, "/readyz"); got.code != 404 {
		t.Errorf("another path: code %d", got.code)
	}
}

func asJSON(at time.Time) string {
	text, _ := json.Marshal(at)
	return string(text)
}

func TestService(t *testing.T) {
	for _, c := range []struct {
		ready   int
		healthy bool
		code    int
	}{{3, true, 200}, {0, true, 503}, {3, false, 503}} {
		h := Service("shop", "web", func() int { return c.ready }, func() State { return State{Healthy: c.healthy} })
		for _, path := range []string{"/", "/healthz", "/any/path"} {
			got := ask(t, h, http.MethodGet, path)
			if got.code != c.code {
				t.Errorf("%+v: code %d of %s", c, got.code, path)
			}
			got.wantHeaders(t, map[string]string{
				"Content-Type": "application/json", "X-Content-Type-Options": "nosniff", "X-Load-Balancing-Endpoint-Weight": fmt.Sprint(c.ready),
			})
			want := fmt.Sprintf("{\n\t\"service\": {\n\t\t\"namespace\": \"shop\",\n\t\t\"name\": \"web\"\n\t},\n\t\"localEndpoints\": %d,\n\t\"serviceProxyHealthy\": %t\n}", c.ready, c.healthy)
			if diff := cmp.Diff(want, got.body); diff != "" {
				t.Errorf("%+v (-want +got):\n%s", c, diff)
			}
		}
	}
}

func TestMode(t *testing.T) {
	h := Mode("ebpf", http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "some") }))
	got := ask(t, h, http.MethodGet, "/proxyMode")
	got.wantHeaders(t, map[string]string{"Content-Type": "text/plain; charset=utf-8", "X-Content-Type-Options": "nosniff"})
	bodies := []string{got.body, ask(t, h, http.MethodGet, "/metrics").body}
	if !slices.Equal(bodies, []string{"ebpf", "some"}) || ask(t, h, http.MethodGet, "/healthz").code != 404 {
		t.Errorf("answers %q", bodies)
	}
}
