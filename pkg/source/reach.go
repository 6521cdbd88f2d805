package source

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"sync"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
)

// The two requests by which a resource is followed.
const (
	verbList  = "list"
	verbWatch = "watch"
)

// reach knows whether a resource of the API can be read, and tells why it can't once.
type reach struct {
	// host is what the API server is called.
	host     func() string
	resource string
	// failed is told of each new error, recovered when the last one is over.
	failed    func(*failure)
	recovered func()

	mu   sync.Mutex
	errs map[string]string // of list and watch
	// unanswered: the newest request was not answered. client-go repeats a watch that times out ten times, and then says
	// that it is an empty one.
	unanswered bool
	// absent is called when the API has no such resource; nil: that is an error like others.
	absent func()
}

// noteAnswer notes that a request was answered, or why it was not.
func (r *reach) noteAnswer(request *http.Request, err error) {
	r.mu.Lock()
	r.unanswered = err != nil
	r.mu.Unlock()
	if err == nil {
		return // what it says is for the caller to note
	}
	verb := verbList
	if request.URL.Query().Get("watch") != "" {
		verb = verbWatch
	}
	r.noteError(verb, err)
}

// noteError reports a failed request, once, and the first that works.
func (r *reach) noteError(verb string, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if err == nil {
		if !r.unanswered {
			r.noteOver(verb)
		}
		return
	}
	if r.absent != nil && apierrors.IsNotFound(err) {
		r.absent()
		return
	}
	// The request's address is the same but for a random parameter.
	if request, ok := errors.AsType[*url.Error](err); ok {
		err = request.Err
	}
	host := r.host()
	if one, ok := errors.AsType[*serverError](err); ok {
		host, err = one.at, one.err
	}
	text := host + err.Error()
	if errors.Is(err, context.Canceled) || text == r.errs[verb] {
		return
	}
	known := text == r.errs[verbList] || text == r.errs[verbWatch]
	if r.errs == nil {
		r.errs = map[string]string{}
	}
	r.errs[verb] = text
	if !known {
		r.failed(&failure{verb: verb, resource: r.resource, host: host, err: err})
	}
}

// noteList notes that a whole list has arrived, whichever request brought it.
func (r *reach) noteList() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.noteOver(verbList)
}

// absentMeans says what to do when the API has no such resource.
func (r *reach) absentMeans(do func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.absent = do
}

// noteAbsence forgets all errors: what is not there can't be read in vain.
func (r *reach) noteAbsence() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.noteOver(verbList)
	r.noteOver(verbWatch)
}

// noteOver forgets the error of a request. The caller holds the lock.
func (r *reach) noteOver(verb string) {
	if r.errs[verb] == "" {
		return
	}
	delete(r.errs, verb)
	if len(r.errs) == 0 {
		r.recovered()
	}
}

// failure is why a resource can't be read.
type failure struct {
	verb, resource, host string
	err                  error
}

// Error implements error.
func (f *failure) Error() string {
	return fmt.Sprintf("%s %s from %s: %v%s", f.verb, f.resource, f.host, f.err, f.advice())
}

// Unwrap returns what the request failed with.
func (f *failure) Unwrap() error { return f.err }

// advice is what to do about a failure that does not end by itself.
func (f *failure) advice() string {
	resource := strings.ToLower(f.resource)
	switch {
	case apierrors.IsForbidden(f.err):
		return fmt.Sprintf("; the agent's ClusterRole has to allow list and watch of %s, as the one that is installed with it does", resource)
	case apierrors.IsNotFound(f.err), apierrors.IsMethodNotSupported(f.err):
		return fmt.Sprintf("; the API server does not serve %s of %s, or something between answers in its place", f.verb, resource)
	}
	return ""
}

// like reports whether another resource can't be read for the same reason.
func (f *failure) like(o failure) bool {
	return f.verb == o.verb && f.host == o.host && f.err.Error() == o.err.Error()
}
