"""What `polarq doctor` looks at, one file per part of a deployment. A check finds facts and says what to do."""
