package server

import (
	"encoding/json"
	"errors"
	"net/http"
)

// Settings are those of a running server that operators read and change on the admin address. Its
// methods may be called from any goroutine; changes wait for each other.
type Settings interface {
	// Values are the settings that can change, by name, with a JSON form, and the state that they have
	// led to, by a name that Change ignores.
	Values() map[string]any
	// Change sets all of these values, or none where it returns an error: a *RefusedError for one
	// that is not accepted.
	Change(values map[string]json.RawMessage) error
}

// RefusedError says why a setting is not changed, and what to do.
type RefusedError struct {
	Name string
	Err  error
	// Unknown: there is no such setting.
	Unknown bool
}

func (e *RefusedError) Error() string { return e.Err.Error() }
func (e *RefusedError) Unwrap() error { return e.Err }

// settings is what the settings that can change are now.
func (s *Server) settings(w *response, r *http.Request) error {
	if _, err := s.changeable(r); err != nil {
		return err
	}
	w.json(http.StatusOK, s.o.Settings.Values())
	return nil
}

// changeSettings changes those in the body, and answers with all as they are then.
func (s *Server) changeSettings(w *response, r *http.Request) error {
	settings, err := s.changeable(r)
	if err != nil {
		return err
	}
	if err := jsonBody(r); err != nil {
		return err
	}
	data, body, err := s.intake.take(w, r)
	defer s.prepared(body)
	if err != nil {
		return err
	}
	o := parseBody(data)
	if o.err != nil {
		return o.err
	}
	if len(o.members) == 0 {
		return badRequest("", "invalid_value", "The body names no setting; GET this URL for those that can change.")
	}
	err = settings.Change(o.members)
	var refused *RefusedError
	switch {
	case errors.As(err, &refused) && refused.Unknown:
		return badRequest(truncate(refused.Name), "unknown_parameter", "%s", Message(err))
	case errors.As(err, &refused):
		return badRequest(refused.Name, "invalid_value", "%s", Message(err))
	case err != nil:
		return &Error{Status: http.StatusInternalServerError, Type: serverError, Message: Message(err)}
	}
	w.json(http.StatusOK, settings.Values())
	return nil
}

// changeable returns the settings that can change, or why none can.
func (s *Server) changeable(r *http.Request) (Settings, error) {
	if _, err := s.current(); err != nil {
		return nil, err
	}
	if s.o.Settings == nil {
		return nil, unknownURL(r.Method, r.URL.Path)
	}
	_, err := parameters(r)
	return s.o.Settings, err
}
